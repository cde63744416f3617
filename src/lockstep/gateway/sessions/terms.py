"""The terms of a session: the key that was minted for it, its budget, and how it ended."""

from __future__ import annotations

import msgspec

from lockstep.tokens.errors import Forbidden


class SessionTerms(msgspec.Struct, frozen=True):
    """Of the key, only the digest is kept; None where none was minted. `cache_salt` names the
    cached prompts that the session may share, None those of its own. `ends` is when the key stops
    to work, on the service clock.

    `calls` that began and `tokens` that were sampled are counted up to their `max_`; None has no
    limit. Once `finished` the session takes no more turns; `reward` is what it was finished with.
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

    def check_budget(self, name: str) -> None:
        """Raises Forbidden when the session may not have one more call."""
        if self.finished:
            raise Forbidden(
                f"session {name!r} is finished: it takes no more turns", param="x-session-id"
            )
        for what, used, most in (
            ("calls", self.calls, self.max_calls),
            ("tokens", self.tokens, self.max_tokens),
        ):
            if most is not None and used >= most:
                raise Forbidden(
                    f"session {name!r} has used {used} {what}, and its budget is {most}: finish it",
                    param="x-session-id",
                )


_DECODER = msgspec.msgpack.Decoder(SessionTerms)
