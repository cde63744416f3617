"""The key that was minted for one session: what it may spend, and how the session ended."""

from __future__ import annotations

import msgspec

from lockstep.tokens.errors import Forbidden


class MintedKey(msgspec.Struct, frozen=True):
    """Only the digest of a key is kept. `cache_salt` names the cached prompts that the session may
    share, None those of its own. `ends` is when the key stops to work, on the service clock.

    `calls` and `tokens` are spent so far, each up to its `max_`; None has no limit. Once `finished`
    the session takes no more turns, and `reward` stands on its samples.
    """

    key_id: str
    digest: bytes
    cache_salt: str | None = None
    ends: float | None = None
    max_calls: int | None = None
    max_tokens: int | None = None
    calls: int = 0
    tokens: int = 0
    finished: bool = False
    reward: float | None = None

    @classmethod
    def decode(cls, raw: bytes | None) -> MintedKey | None:
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

    def spent(self, tokens: int) -> MintedKey:
        """This key after one more call that sampled so many tokens."""
        return msgspec.structs.replace(self, calls=self.calls + 1, tokens=self.tokens + tokens)

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


_DECODER = msgspec.msgpack.Decoder(MintedKey)
