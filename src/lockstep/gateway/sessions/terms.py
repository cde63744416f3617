"""The terms of a session: the key that was minted for it, its budget, and how it ended."""

from __future__ import annotations

from typing import Literal

import msgspec

from lockstep.tokens.errors import Forbidden

EndedBy = Literal["finish", "harness", "calls", "tokens", "seconds"]


class SessionEnd(msgspec.Struct, frozen=True):
    """That a session takes no more turns: `by` whom or by which part of its budget, when (seconds
    since 1970), and the reward it was finished with."""

    by: EndedBy
    at: float
    reward: float | None = None


class SessionTerms(msgspec.Struct, frozen=True):
    """Of the key, only the digest is kept; None where none was minted. `cache_salt` names the
    cached prompts that the session may share, None those of its own. `ends` is when the key stops
    to work, on the service clock.

    `calls` that began and `tokens` that were sampled are counted up to their `max_`; None has no
    limit. Once `finished` the session takes no more turns; `reward` is what it was finished with.
    `ended_by` and `ended_at` are what ended it first; running out of `seconds` is not noted, as
    `ends` says it.
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
        """What `encode` wrote. Raises msgspec.DecodeError for anything else."""
        return None if raw is None else _DECODER.decode(raw)

    @classmethod
    def is_readable(cls, raw: bytes | None) -> bool:
        try:
            cls.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False
        return True

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    def called(self) -> SessionTerms:
        """These terms after one more call has begun: many at once must not pass the budget."""
        return msgspec.structs.replace(self, calls=self.calls + 1)

    def sampled(self, tokens: int) -> SessionTerms:
        """These terms after so many more tokens were sampled."""
        return msgspec.structs.replace(self, tokens=self.tokens + tokens)

    def end(self, now: float, time: float) -> SessionEnd | None:
        """How the session ended, or None; `now` on the service clock is the `time` of day."""
        if self.ended_by is not None:
            return SessionEnd(self.ended_by, self.ended_at, self.reward)
        if self.finished:  # by a gateway that did not note when
            return SessionEnd("finish", time, self.reward)
        if self.ends is not None and now >= self.ends:
            return SessionEnd("seconds", time - (now - self.ends))
        return None

    def ended(self, by: EndedBy, time: float) -> SessionTerms:
        """These terms after the session ended; what ended it first stands."""
        if self.ended_by is not None:
            return self
        return msgspec.structs.replace(self, ended_by=by, ended_at=time)

    def used_up(self) -> EndedBy | None:
        """Which part of the budget is used, if any."""
        if self.max_calls is not None and self.calls >= self.max_calls:
            return "calls"
        if self.max_tokens is not None and self.tokens >= self.max_tokens:
            return "tokens"
        return None

    def check_budget(self, name: str) -> None:
        """Raises Forbidden when the session may not have one more call."""
        if self.finished or self.ended_by == "harness":
            raise Forbidden(
                f"session {name!r} is finished: it takes no more turns", param="x-session-id"
            )
        if (what := self.used_up()) is not None:
            used, most = getattr(self, what), getattr(self, f"max_{what}")
            raise Forbidden(
                f"session {name!r} has used {used} {what}, and its budget is {most}: finish it",
                param="x-session-id",
            )


_DECODER = msgspec.msgpack.Decoder(SessionTerms)
