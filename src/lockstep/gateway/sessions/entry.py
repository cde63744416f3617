"""What is known of a session without reading its turns: size, times, what was read."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.gateway.sessions.terms import SessionEnd, SessionTerms
from lockstep.tokens.errors import Unavailable


@dataclass(slots=True, eq=False)
class SessionEntry:
    """A session; it changes with every turn. Times are seconds since 1970, but `active` is of the
    service clock.

    `id` is None until the session is kept. `read_turns` is how many turns it had when its samples
    were last read, `breaks` how many prefix breaks a shared store holds.
    """

    id: int | None
    name: str
    tokenizer: bytes
    created: float
    used: float
    active: float
    turns: int = 0
    bytes: int = 0
    read_turns: int = 0
    terms: SessionTerms | None = None
    breaks: int = 0
    damaged: bool = False

    @property
    def was_read(self) -> bool:
        """Whether the samples of all its turns were read."""
        return self.read_turns >= self.turns

    def update(self, later: SessionEntry) -> None:
        """Takes over what a store says of it, unless that is older than what is known."""
        if later.turns < self.turns:
            return
        self.id, self.tokenizer, self.terms = later.id, later.tokenizer, later.terms
        self.turns, self.bytes, self.breaks = later.turns, later.bytes, later.breaks
        self.read_turns = later.read_turns

    def check_whole(self) -> None:
        """Raises Unavailable when what is stored of it is damaged."""
        if self.damaged:
            raise Unavailable(
                f"the stored row of session {self.name!r} is damaged: delete the session"
            )


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session at a glance. Times are seconds since 1970.

    `unread_turns` counts those that came after its samples were last read. `finished` and `reward`
    are how it was finished, if it was; `ended` says that it takes no more turns, and why.
    """

    id: str
    turns: int
    bytes: int
    created: float
    used: float
    unread_turns: int
    finished: bool = False
    reward: float | None = None
    ended: SessionEnd | None = None

    @classmethod
    def of(cls, entry: SessionEntry, now: float, time: float) -> SessionInfo:
        """What an entry says, when `now` on the service clock is the `time` of day."""
        unread = max(0, entry.turns - entry.read_turns)
        terms = entry.terms or SessionTerms()
        return cls(
            entry.name, entry.turns, entry.bytes, entry.created, entry.used, unread, terms.finished,
            terms.reward, terms.end(now, time),
        )  # fmt: skip
