"""The error hierarchy. Every error has a stable code and says what was expected and received.

LockstepError
├── BadRequest                400  the caller sent something wrong; `param` names the field
│   ├── UnknownField               a field that the server does not know
│   ├── UnsupportedField           a known field at a value that the server does not support
│   ├── BadTokenId                 empty, negative, out of vocabulary or not an integer
│   ├── CustomCode                 a tokenizer that asks for Python code of its own
│   ├── GrammarLimit               a grammar that takes too much CPU time, memory or stack
│   └── PromptTooLong              the context cannot hold one more token
├── Unauthorized              401  no token, or the wrong one
├── Forbidden                 403  a path, host or key that is not allowed here
├── NotFound                  404  no such route, model, session or operation
│   ├── UnknownModel               neither a served model nor a loaded adapter
│   ├── ThreadNotFound             the gateway does not hold the thread of messages
│   └── Gone                  410  it existed and is no longer kept
├── Conflict                  409  valid request at the wrong time
│   ├── VersionUnavailable         the required weight version is not served
│   ├── Superseded                 a command of a gateway that a later one has replaced
│   ├── PrefixBreak                the next prompt cannot start with the stored ids
│   └── NotExact                   trainer and engine cannot agree bit for bit, with the reason
├── TooLarge                  413  a body or a session beyond its limit
├── CheckpointError           422  weights that must not be loaded; nothing was changed
│   ├── AdapterError               the same for a LoRA adapter
│   └── MissingObject              an object store has no such object
├── Busy                      429  a queue is full; retry later
├── EngineFailure             500  the engine failed while processing the request
│   └── WeightsLost                it holds neither the new weights nor the old ones
├── RolloutFailed             500  an environment raised during a rollout
├── UpdateFailed              502  an update did not happen; the workers keep their weights
├── ContractError             502  a response that violates the token contract
│   ├── MissingTokenIds            no ids in the response: they are never made from text
│   ├── Misaligned                 ids and logprobs that do not belong together
│   ├── BadLogprob                 null, NaN, infinite or a sentinel
│   ├── MissingFinish              a response without a finish reason
│   ├── BadExperts                 routed experts with wrong rows, shape or dtype
│   ├── BadSupport                 supports of sampled tokens that are malformed or missing
│   ├── ImpossibleResponse         ids, logprobs or lengths that no engine can return
│   ├── BadVersions                spans that do not cover the tokens
│   └── Disproved                  other logprobs than the claimed weights would give
├── Unavailable               503  no server can take the request now
└── DeadlineExceeded          504  the time limit was exceeded

An error that crosses a process boundary is raised again as the same class with the same fields:
`protocol.common.error_body` writes it, `protocol.common.decode_error` finds the class by its code.
"""

from __future__ import annotations

import re
from typing import ClassVar, Self

from lockstep.tokens.operation import Operation

MAX_MESSAGE = 4096
"""Longest message of an error, in characters. Messages are sent, logged and stored, and may quote
what a caller sent: a tensor's name, for example, of 50 MB.
"""


def shorten(text: str, length: int = MAX_MESSAGE) -> str:
    """Return the text, cut to `length` characters."""
    return text if len(text) <= length else text[: length - 3] + "..."


class LockstepError(Exception):
    """Base class of every error that Lockstep raises on purpose. Each subclass has its own
    `code`.
    """

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500
    fields: ClassVar[tuple[str, ...]] = ()
    """Additional string attributes of a class, besides those of every error."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
        operation: Operation | None = None,
    ) -> None:
        message = shorten(message)
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after
        """Seconds after which a retry makes sense, if known."""
        self.operation = operation
        """The failed fleet operation, with the result of each worker."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.__dict__.get("code") is None or cls.code in BY_CODE:
            raise TypeError(f"{cls.__name__} needs a code that no other error has")
        BY_CODE[cls.code] = cls

    def with_message(self, message: str) -> Self:
        """Return the same error with another message and all its fields."""
        message = shorten(message)
        same = type(self).__new__(type(self), message)
        same.__dict__.update(self.__dict__, message=message)
        return same


BY_CODE: dict[str, type[LockstepError]] = {LockstepError.code: LockstepError}
"""Every error class by its code; classes register when they are defined."""


class BadRequest(LockstepError):
    code = "bad_request"
    status = 400


class UnknownField(BadRequest):
    code = "unknown_field"


class UnsupportedField(BadRequest):
    code = "unsupported_field"


class BadTokenId(BadRequest):
    code = "bad_token_id"


class CustomCode(BadRequest):
    """The tokenizer asks for Python code of its own, which is never run."""

    code = "custom_code"


class GrammarLimit(BadRequest):
    """The grammar exceeded a limit of the process that compiles and advances it."""

    code = "grammar_limit"


class PromptTooLong(BadRequest):
    """The context cannot hold one more token. `of` words the message as clients recognise it."""

    code = "prompt_too_long"
    _COUNTS = re.compile(
        r"maximum context length is (?P<limit>\d+) tokens.*your prompt has (?P<length>\d+) tokens"
    )

    @classmethod
    def of(cls, length: int, limit: int, *, param: str) -> PromptTooLong:
        """Return the error of a prompt of `length` tokens for a context of `limit`.

        Clients that shorten the conversation or give up match the first words and "reduce the
        length of the messages"; without them, they treat the error as transient.
        """
        return cls(
            f"This model's maximum context length is {limit} tokens. However, your prompt has "
            f"{length} tokens, and room for at least one more is needed. Please reduce the length "
            "of the messages.",
            param=param,
        )

    @property
    def counts(self) -> tuple[int, int] | None:
        """The length and the limit, parsed from a message of `of`: an error that was received from
        another process has nothing else.
        """
        match = self._COUNTS.search(self.message)
        return None if match is None else (int(match["length"]), int(match["limit"]))


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


class ThreadNotFound(NotFound):
    code = "thread_not_found"


class Gone(NotFound):
    code = "gone"
    status = 410


class Conflict(LockstepError):
    code = "conflict"
    status = 409


class VersionUnavailable(Conflict):
    code = "version_unavailable"


class Superseded(Conflict):
    """The worker obeys a later generation of its gateway and rejects this one."""

    code = "superseded"


class PrefixBreak(Conflict):
    """The next prompt cannot start with the ids of the turns before it; `cause` is the reason."""

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
    """Bit-equal logprobs were required, but these processes cannot produce them."""

    code = "not_exact"


class TooLarge(LockstepError):
    code = "body_too_large"
    status = 413


class CheckpointError(LockstepError):
    code = "bad_checkpoint"
    status = 422


class MissingObject(CheckpointError):
    """An object store has no such object."""

    code = "missing_object"


class AdapterError(CheckpointError):
    code = "bad_adapter"


class Busy(LockstepError):
    code = "busy"
    status = 429


class EngineFailure(LockstepError):
    code = "engine_failure"
    status = 500


class WeightsLost(EngineFailure):
    """The new weights did not load and the old ones could not be restored: restart the worker."""

    code = "weights_lost"


class UpdateFailed(LockstepError):
    """The update did not happen: every worker that gets traffic keeps its weights."""

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


class BadSupport(ContractError):
    """The recorded support of sampled tokens is malformed, or training needs it and has none."""

    code = "bad_support"


class ImpossibleResponse(ContractError):
    """A worker returned a token id outside the vocabulary, a positive logprob, or too many tokens.

    The worker is at fault: it is ejected, and nothing of the response is stored.
    """

    code = "impossible_response"


class BadVersions(ContractError):
    code = "bad_versions"


class Disproved(ContractError):
    """A worker computed other logprobs than the weights it claims to hold would give."""

    code = "disproved"


class Unavailable(LockstepError):
    code = "unavailable"
    status = 503

    lost = False
    """Whether the connection was lost after the request was sent: the server may have died of
    it."""


class DeadlineExceeded(LockstepError):
    code = "deadline_exceeded"
    status = 504


WORKER_FAILURES = (Unavailable, EngineFailure)
"""Errors of a worker: the same request may succeed on another one, or a little later."""
