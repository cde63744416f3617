"""A session at a glance, as the routes and the dashboard show it."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.storage.session_entry import SessionEnd, SessionEntry, SessionTerms


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session without its turns. Times are seconds since 1970.

    `unread_turns` counts the turns since its samples were last read. `finished` and `reward` say
    how it was finished; `ended` says when and why it stopped taking turns, None while it is open.
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
        """Return the view of an entry. `now` on the service clock is the same moment as `time`."""
        unread = max(0, entry.turns - entry.read_turns)
        terms = entry.terms or SessionTerms()
        return cls(
            entry.name, entry.turns, entry.bytes, entry.created, entry.used, unread, terms.finished,
            terms.reward, terms.end(now, time),
        )  # fmt: skip
