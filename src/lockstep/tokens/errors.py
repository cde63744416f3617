"""The one error hierarchy: each error has a stable code, says what was expected and what came.

LockstepError
├── BadRequest                400  the caller sent something wrong; `param` names the field
│   ├── UnknownField               a field nobody knows
│   ├── UnsupportedField           a known field, at a value this server cannot honour
│   ├── BadTokenId                 empty, negative, out of vocabulary or not an integer
│   └── PromptTooLong              the context cannot hold one more token
├── Unauthorized              401  no token, or the wrong one
├── Forbidden                 403  a path, host or key that is not allowed here
├── NotFound                  404  no such route, model, session or operation
│   ├── UnknownModel               neither a served model nor a loaded adapter
│   └── Gone                  410  it was there, and is not kept any more
├── Conflict                  409  right request, wrong moment
│   ├── VersionUnavailable         the demanded weight version is not the one served
│   ├── Superseded                 a command of a gateway whose workers obey a later one now
│   ├── PrefixBreak                the next prompt cannot start with the stored ids
│   └── NotExact                   trainer and engine cannot agree bit for bit; says why
├── TooLarge                  413  a body, or a session, past its limit
├── CheckpointError           422  weights that must not be loaded; nothing was touched
│   └── AdapterError               the same for a LoRA adapter
├── Busy                      429  a queue is full; try again later
├── EngineFailure             500  the engine broke while it worked on the request
│   └── WeightsLost                it holds neither the new weights nor the old ones any more
├── RolloutFailed             500  an environment raised while a task was played
├── UpdateFailed              502  an update that did not happen; its workers hold what they held
├── ContractError             502  a response that breaks the token contract
│   ├── MissingTokenIds            no ids in the response: they are never made from text
│   ├── Misaligned                 ids and logprobs that do not belong together
│   ├── BadLogprob                 null, NaN, infinite or a sentinel
│   ├── MissingFinish              a response that ends without saying why
│   ├── BadExperts                 routed experts whose rows, shape or dtype are off
│   ├── BadVersions                spans that do not cover the tokens
│   └── Disproved                  other logprobs than the claimed weights would give
├── Unavailable               503  no server can take this now
└── DeadlineExceeded          504  it took longer than it may

An error that leaves a process comes back in the next one as the same class with the same fields:
`protocol.common.error_body` writes it, `protocol.common.decode_error` finds the class by its code.
"""

from __future__ import annotations

import re
from typing import ClassVar, Self

from lockstep.tokens.operation import Operation


class LockstepError(Exception):
    """Base of every error that Lockstep raises on purpose. Each class has a `code` of its own."""

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500
    fields: ClassVar[tuple[str, ...]] = ()
    """Attributes, each a string, that a class has beside those of every error."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
        operation: Operation | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after
        """Seconds after which trying again makes sense, where somebody knows."""
        self.operation = operation
        """The operation of a fleet that failed with this, and how each worker fared."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.__dict__.get("code") is None or cls.code in BY_CODE:
            raise TypeError(f"{cls.__name__} needs a code that no other error has")
        BY_CODE[cls.code] = cls

    def with_message(self, message: str) -> Self:
        """The same error in other words; all its fields stay."""
        same = type(self).__new__(type(self), message)
        same.__dict__.update(self.__dict__, message=message)
        return same


BY_CODE: dict[str, type[LockstepError]] = {LockstepError.code: LockstepError}
"""Every class by its code; a class enters it when it is defined."""


class BadRequest(LockstepError):
    code = "bad_request"
    status = 400


class UnknownField(BadRequest):
    code = "unknown_field"


class UnsupportedField(BadRequest):
    code = "unsupported_field"


class BadTokenId(BadRequest):
    code = "bad_token_id"


class PromptTooLong(BadRequest):
    """The context cannot hold one more token. `of` words it as clients recognise it."""

    code = "prompt_too_long"
    _COUNTS = re.compile(
        r"maximum context length is (?P<limit>\d+) tokens.*your prompt has (?P<length>\d+) tokens"
    )

    @classmethod
    def of(cls, length: int, limit: int, *, param: str) -> PromptTooLong:
        """The error of a prompt of `length` tokens for a context of `limit`.

        Clients that shorten the conversation, or give up at once, look for the first words and for
        "reduce the length of the messages"; without them they take it for a passing fault.
        """
        return cls(
            f"This model's maximum context length is {limit} tokens. However, your prompt has "
            f"{length} tokens, and room for at least one more is needed. Please reduce the length "
            "of the messages.",
            param=param,
        )

    @property
    def counts(self) -> tuple[int, int] | None:
        """The length and the limit, where the message is that of `of`: of an error that comes from
        another process there is nothing else."""
        found = self._COUNTS.search(self.message)
        return None if found is None else (int(found["length"]), int(found["limit"]))


class Unauthorized(LockstepError):
    code = "unauthorized"
    status = 401


class Forbidden(LockstepError):
    code = "forbidden"
    status = 403


class NotFound(LockstepError):
    code = "not_found"
    status = 404


class UnknownModel(NotFound):
    code = "unknown_model"


class Gone(NotFound):
    code = "gone"
    status = 410


class Conflict(LockstepError):
    code = "conflict"
    status = 409


class VersionUnavailable(Conflict):
    code = "version_unavailable"


class Superseded(Conflict):
    """The worker has obeyed a later generation of its gateway: this one controls it no more."""

    code = "superseded"


class PrefixBreak(Conflict):
    """The next prompt cannot start with the ids of the turns before it; `cause` says why."""

    code = "prefix_break"

    fields = ("cause",)

    def __init__(
        self,
        message: str,
        *,
        cause: str,
        param: str | None = None,
        retry_after: float | None = None,
        operation: Operation | None = None,
    ) -> None:
        super().__init__(message, param=param, retry_after=retry_after, operation=operation)
        self.cause = cause


class NotExact(Conflict):
    """Bit-equal logprobs were demanded where these processes cannot have them."""

    code = "not_exact"


class TooLarge(LockstepError):
    code = "body_too_large"
    status = 413


class CheckpointError(LockstepError):
    code = "bad_checkpoint"
    status = 422


class AdapterError(CheckpointError):
    code = "bad_adapter"


class Busy(LockstepError):
    code = "busy"
    status = 429


class EngineFailure(LockstepError):
    code = "engine_failure"
    status = 500


class WeightsLost(EngineFailure):
    """The new weights did not load and the old ones could not be put back: start it again."""

    code = "weights_lost"


class UpdateFailed(LockstepError):
    """The update did not happen: every worker that gets traffic holds what it held before."""

    code = "update_failed"
    status = 502


class RolloutFailed(LockstepError):
    code = "rollout_failed"
    status = 500


class ContractError(LockstepError):
    code = "contract_error"
    status = 502


class MissingTokenIds(ContractError):
    code = "missing_token_ids"


class Misaligned(ContractError):
    code = "misaligned"


class BadLogprob(ContractError):
    code = "bad_logprob"


class MissingFinish(ContractError):
    code = "missing_finish"


class BadExperts(ContractError):
    code = "bad_experts"


class BadVersions(ContractError):
    code = "bad_versions"


class Disproved(ContractError):
    """A worker computed other logprobs than the weights it claims to hold would give."""

    code = "disproved"


class Unavailable(LockstepError):
    code = "unavailable"
    status = 503


class DeadlineExceeded(LockstepError):
    code = "deadline_exceeded"
    status = 504
