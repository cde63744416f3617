"""The row of a session: sizes, times and terms, without its turns.

The terms are the key that was minted for the session, its budget, and how it ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import msgspec

from lockstep.tokens.errors import Forbidden, Unavailable

CHECKSUM_BYTES = 8
EndedBy = Literal["finish", "harness", "calls", "tokens", "seconds"]


class SessionEnd(msgspec.Struct, frozen=True):
    """The end of a session that takes no more turns.

    `by` names the caller or the part of the budget that ended it, `at` is in seconds since 1970.
    """

    by: EndedBy
    at: float
    reward: float | None = None


class SessionTerms(msgspec.Struct, frozen=True):
    """The key, the budget and the end of a session. Stored as a MessagePack map of these fields.

    `digest` is the SHA-256 of the key, None without one; the key itself is never stored. Sessions
    with the same `cache_salt` share cached prompts; None shares with none. The key expires at
    `ends` on the service clock.

    `calls` and `tokens` count up to `max_calls` and `max_tokens`; None is no limit. A `finished`
    session takes no more turns. `ended_by` and `ended_at` record the first cause of the end, except
    for running out of seconds, which `ends` already says.
    """

    key_id: str | None = None
    digest: bytes | None = None
    cache_salt: str | None = None
    ends: float | None = None
    max_calls: int | None = None
    max_tokens: int | None = None
    calls: int = 0
    tokens: int = 0
    finished: bool = False
    reward: float | None = None
    ended_by: EndedBy | None = None
    ended_at: float = 0.0

    @classmethod
    def decode(cls, raw: bytes | None) -> SessionTerms | None:
        """Decode what `encode` wrote. Raises msgspec.DecodeError for anything else."""
        return None if raw is None else _DECODER.decode(raw)

    @classmethod
    def is_readable(cls, raw: bytes | None) -> bool:
        """Return whether `decode` would succeed."""
        try:
            cls.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False
        return True

    def encode(self) -> bytes:
        """Encode these terms for a store."""
        return msgspec.msgpack.encode(self)

    def add_calls(self, name: str, calls: int) -> SessionTerms:
        """Return these terms of session `name` with that many more calls counted. Raises Forbidden
        when the budget has fewer left.

        A call counts when it begins, so that concurrent calls cannot exceed the budget.
        """
        if self.max_calls is not None and self.calls + calls > self.max_calls:
            raise Forbidden(
                f"session {name!r} has used {self.calls} calls of its budget of {self.max_calls}, "
                f"and this request needs {calls} more: each of n choices counts as a call",
                param="n",
            )
        return msgspec.structs.replace(self, calls=self.calls + calls)

    def add_tokens(self, tokens: int) -> SessionTerms:
        """Return these terms with that many more sampled tokens counted."""
        return msgspec.structs.replace(self, tokens=self.tokens + tokens)

    def end(self, now: float, time: float) -> SessionEnd | None:
        """Return how the session ended, or None while it is open.

        `now` on the service clock is the same moment as `time` in seconds since 1970.
        """
        if self.ended_by is not None:
            return SessionEnd(self.ended_by, self.ended_at, self.reward)
        if self.finished:  # by a release that did not record the time
            return SessionEnd("finish", time, self.reward)
        if self.ends is not None and now >= self.ends:
            return SessionEnd("seconds", time - (now - self.ends))
        return None

    def with_end(self, by: EndedBy, time: float) -> SessionTerms:
        """Return these terms with this end, or unchanged if an earlier end is recorded."""
        if self.ended_by is not None:
            return self
        return msgspec.structs.replace(self, ended_by=by, ended_at=time)

    def exhausted(self) -> EndedBy | None:
        """Return the part of the budget that is used up, or None."""
        if self.max_calls is not None and self.calls >= self.max_calls:
            return "calls"
        if self.max_tokens is not None and self.tokens >= self.max_tokens:
            return "tokens"
        return None

    def check_budget(self, name: str) -> None:
        """Raise Forbidden when the session may not have one more call."""
        if self.finished or self.ended_by == "harness":
            raise Forbidden(
                f"session {name!r} is finished: it takes no more turns", param="x-session-id"
            )
        if (what := self.exhausted()) is not None:
            used, limit = getattr(self, what), getattr(self, f"max_{what}")
            raise Forbidden(
                f"session {name!r} has used {used} {what}, and its budget is {limit}: finish it",
                param="x-session-id",
            )


_DECODER = msgspec.msgpack.Decoder(SessionTerms)


@dataclass(slots=True, eq=False)
class SessionEntry:
    """The row of a session; it changes with every turn.

    Times are seconds since 1970, except `active`, which is on the service clock. `id` is None until
    the session is stored. `read_turns` is how many turns it had when its samples were last read,
    `breaks` how many prefix breaks a shared store holds. A `damaged` row has no sizes.
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

    def update(self, stored: SessionEntry) -> None:
        """Copy what the store says, unless this entry has more turns already."""
        if stored.turns < self.turns:
            return
        self.id, self.tokenizer, self.terms = stored.id, stored.tokenizer, stored.terms
        self.turns, self.bytes, self.breaks = stored.turns, stored.bytes, stored.breaks
        self.read_turns = stored.read_turns

    def check_readable(self) -> None:
        """Raise Unavailable when the stored row is damaged."""
        if self.damaged:
            raise Unavailable(
                f"the stored row of session {self.name!r} is damaged: delete the session"
            )


def turn_checksum(session: str, turn: int, data: bytes) -> bytes:
    """Return the digest of a turn and its position, so that two swapped turns are detected."""
    digest = blake2b(f"{session}:{turn}:".encode(), digest_size=CHECKSUM_BYTES)
    digest.update(data)
    return digest.digest()


def damaged_session(name: str, problem: str, place: str) -> Unavailable:
    """Return the error for a session whose stored turns are damaged."""
    return Unavailable(
        f"session {name!r} cannot be read back: {problem}; the {place} is damaged, delete the "
        "session"
    )
