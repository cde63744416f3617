"""Parts of responses shared by all dialects: strict decoding, logprob entries, finish reasons."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from lockstep.protocol.common.prompt_logprobs import most_likely
from lockstep.protocol.common.request import GenerateRequest
from lockstep.tokens import Finish, LogprobMode, Ranked, VersionSpan
from lockstep.tokens.errors import (
    BadLogprob,
    ContractError,
    EngineFailure,
    Misaligned,
    MissingFinish,
    MissingTokenIds,
)

T = TypeVar("T")
UNKNOWN_VERSION = "unknown"
"""The version of tokens whose server does not tell one and for which the caller named none."""
TOKEN_PREFIX = "token_id:"
SEPARATOR = f"\n{TOKEN_PREFIX}".encode()
NONFINITE = re.compile(rb"\b(?:NaN|Infinity)\b")
FINISH: dict[str, Finish] = {
    "stop": "stop",
    "eos": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "abort": "abort",
    "cancelled": "abort",
}


@dataclass(frozen=True, slots=True)
class Reading:
    """Context of a decoder: the request, and facts that no server repeats in its response."""

    request: GenerateRequest
    logprob_mode: LogprobMode = "raw"
    version: str = UNKNOWN_VERSION
    worker: str | None = None
    adapter: str | None = None
    index: int = 0


@dataclass(frozen=True, slots=True)
class Provenance:
    """How streamed tokens were made, as far as their server tells before the stream ends.

    `version` is that of the newest token, None if only the end tells it.
    """

    logprob_mode: LogprobMode
    version: str | None = None
    worker: str | None = None
    adapter: str | None = None

    @classmethod
    def of(cls, reading: Reading) -> Provenance:
        """Return what is known of a server whose stream does not tell more."""
        version = None if reading.version == UNKNOWN_VERSION else reading.version
        return cls(reading.logprob_mode, version, reading.worker, reading.adapter)


@dataclass(frozen=True, slots=True)
class StreamDelta:
    """Tokens that a stream has just brought for choice `index`, with their logprobs."""

    index: int
    token_ids: list[int]
    logprobs: list[float]
    made: Provenance | None = field(default=None, compare=False)


class GenerateUsage(msgspec.Struct):
    """The token counts of a response, as OpenAI and vLLM have them."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: dict[str, int] | None = None
    completion_tokens_details: dict[str, int] | None = None


def usage_of(
    prompt_tokens: int, completion_tokens: int, cached: int | None = None
) -> GenerateUsage:
    """Return the token counts of a response; `cached` prompt tokens came from the prefix cache."""
    details = None if cached is None else {"cached_tokens": cached}
    return GenerateUsage(
        prompt_tokens, prompt_tokens + completion_tokens, completion_tokens, details
    )


class TopLogprob(msgspec.Struct, gc=False):
    token_id: int | None = None
    token: str | None = None
    logprob: float | None = None
    rank: int | None = None


class BareLogprobEntry(msgspec.Struct, gc=False):
    """One sampled token of a server that writes `token_id`: its text is not even decoded."""

    token_id: int | None = None
    logprob: float | None = None
    rank: int | None = None


class LogprobEntry(BareLogprobEntry, gc=False):
    """One sampled token. Its id stands in `token_id`, or in `token` as `token_id:N`, or in both."""

    token: str | None = None


class RankedLogprobEntry(LogprobEntry, gc=False):
    """The same with its alternatives, for callers who requested them; others need not pay."""

    top_logprobs: list[TopLogprob] | None = None


def decode_response(decoder: msgspec.json.Decoder[T], body: bytes | bytearray) -> T:
    """The typed response. Raises ContractError when it is not JSON or of another shape."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise ContractError(f"the response has an unexpected shape: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        # Some servers write NaN, which is no JSON: read it the slow way, so that the error can
        # name the position, and callers who opted in can keep it.
        if NONFINITE.search(body) is None:
            raise ContractError(f"the response is not JSON: {error}") from None
    try:
        return msgspec.convert(json.loads(bytes(body)), decoder.type)
    except (ValueError, msgspec.ValidationError) as error:
        raise ContractError(f"the response is not JSON of the expected shape: {error}") from None


def ids_of(token_ids: list[int] | None, where: str) -> list[int]:
    """The ids, which may be empty but not absent. Raises MissingTokenIds."""
    if token_ids is None:
        raise MissingTokenIds(
            f"{where} has no token ids: they are never made from text; use a server that "
            "returns the ids it sampled"
        )
    return token_ids


def logprobs_of(
    token_ids: list[int], content: Sequence[BareLogprobEntry | None] | None, *, nulls: bool = False
) -> list[float]:
    """The logprob of each sampled token. The list is never shortened, nor a gap filled.

    Raises BadLogprob for a null or missing entry, Misaligned when the lengths differ or an entry
    names another token, each with the position. `nulls` reads a null as NaN, for callers who
    opted in to keep such values.
    """
    if content is None:
        if not token_ids:
            return []
        raise BadLogprob(f"the response has {len(token_ids)} token ids but no logprobs")
    if len(content) != len(token_ids):
        raise Misaligned(f"{len(token_ids)} token ids but {len(content)} logprobs")
    if len(content) == 1:  # an event of a stream
        only = content[0]
        if only is not None and only.token_id == token_ids[0] and only.logprob is not None:
            return [only.logprob]
    try:
        values = [entry.logprob for entry in content]  # type: ignore[union-attr]
    except AttributeError:
        present(content)
        raise
    check_named(token_ids, content)  # type: ignore[arg-type]  # None was ruled out above
    return numbers(values, nulls=nulls)


def numbers(values: list[float | None], *, nulls: bool) -> list[float]:
    """The values, none of them null. Raises BadLogprob with the position of the first that is."""
    try:
        sum(values)  # type: ignore[arg-type]  # an order cheaper than a comparison per value
    except TypeError:
        if not nulls:
            raise BadLogprob(f"logprob at position {values.index(None)} is null") from None
        return [float("nan") if value is None else value for value in values]
    return values  # type: ignore[return-value]  # None was ruled out above


def present(content: Sequence[BareLogprobEntry | None]) -> Sequence[BareLogprobEntry]:
    """The entries, none of them null. Raises BadLogprob with the position of the first that is."""
    for at, entry in enumerate(content):
        if entry is None:
            raise BadLogprob(f"logprob at position {at} is null")
    return content  # type: ignore[return-value]  # None was ruled out above


def check_named(token_ids: list[int], entries: Sequence[BareLogprobEntry]) -> None:
    """Raises Misaligned at the first entry that names another token than the id at its place.

    An entry that names its token only as text names no id, and so proves nothing: Misaligned too.
    """
    if not entries or _named(entries, token_ids):
        return
    for at, (token, entry) in enumerate(zip(token_ids, entries, strict=True)):
        if token_named(entry) != token:
            name = entry.token_id
            if name is None and isinstance(entry, LogprobEntry):
                raise Misaligned(
                    f"the logprob at position {at} names token {entry.token!r}, "
                    f"but the id there is {token}"
                )
            raise Misaligned(
                f"the logprob at position {at} names token {name}, but the id there is {token}"
            )


def _named(entries: Sequence[BareLogprobEntry], token_ids: list[int]) -> bool:
    """Whether all entries name the ids at their places, if all spell them the same way."""
    if entries[0].token_id is not None:
        return [entry.token_id for entry in entries] == token_ids
    if not isinstance(entries[0], LogprobEntry):
        return False
    try:
        names = "\n".join([entry.token for entry in entries])  # type: ignore[attr-defined]
    except (TypeError, AttributeError):  # some are named otherwise than the first
        return False
    # One comparison of joined text is several times cheaper than an int() per token, and as
    # exact: there are as many line breaks as there are names, so no name can hold one.
    expected = msgspec.json.encode(token_ids)[1:-1].replace(b",", SEPARATOR).decode()
    return names == TOKEN_PREFIX + expected


def token_named(entry: BareLogprobEntry | TopLogprob) -> int | None:
    """The id an entry names, or None when it only has text."""
    if entry.token_id is not None:
        return entry.token_id
    text = (entry.token if isinstance(entry, LogprobEntry | TopLogprob) else None) or ""
    digits = text.removeprefix(TOKEN_PREFIX)
    return int(digits) if digits != text and digits.isdecimal() else None


def ranks_of(content: Sequence[BareLogprobEntry | None] | None) -> list[int] | None:
    """The rank of each sampled token, where the server tells all of them."""
    if not content or content[0] is None or content[0].rank is None:
        return None
    ranks = [entry.rank for entry in content if entry is not None]
    try:
        sum(ranks)  # type: ignore[arg-type]  # an order cheaper than a comparison per rank
    except TypeError:
        return None
    return ranks  # type: ignore[return-value]  # None was ruled out above


def tops_of(
    content: Sequence[BareLogprobEntry | None] | None, top: int
) -> list[tuple[Ranked, ...]] | None:
    """The `top` most likely tokens at each position, or None when `top` is 0."""
    if not top or content is None:
        return None
    result = []
    for at, entry in enumerate(content):
        listed = entry.top_logprobs if isinstance(entry, RankedLogprobEntry) else None
        result.append(most_likely((_ranked(alternative, at) for alternative in listed or ()), top))
    return result


def _ranked(entry: TopLogprob, at: int) -> Ranked:
    token = token_named(entry)
    if token is None:
        raise MissingTokenIds(
            f"an alternative at position {at} is only named by its text {entry.token!r}: "
            "ids are never made from text"
        )
    if entry.logprob is None:
        raise BadLogprob(f"the alternative {token} at position {at} has no logprob")
    return Ranked(token, entry.logprob, entry.rank)


def finish_of(reason: str | None) -> Finish:
    """The finish reason. Raises MissingFinish without one, EngineFailure for `error`."""
    if reason is not None and reason.split(":")[0] == "error":
        raise EngineFailure(f"the engine ended the generation with {reason!r}")
    if reason not in FINISH:
        raise MissingFinish(
            f"the response ends with finish reason {reason!r}, expected one of {', '.join(FINISH)}"
        )
    return FINISH[reason]


def spans_of(
    spans: Sequence[VersionSpan] | None, version: str, tokens: int
) -> tuple[VersionSpan, ...]:
    """The server's spans, or one span of `version` over all tokens where it has none."""
    if not tokens:
        return ()
    if spans is None:
        return (VersionSpan(version, 0, tokens),)
    return tuple(spans)


def stop_token_of(
    named: object, finish: Finish, ids: list[int], request: GenerateRequest
) -> int | None:
    """The token that ended the turn: the one the server names, else a stop id that came last."""
    if isinstance(named, int):
        return named
    if isinstance(named, str):
        return None
    ended = finish == "stop" and bool(ids) and ids[-1] in request.sampling.stop_token_ids
    return ids[-1] if ended else None


def stop_string_of(named: object) -> str | None:
    """The stop string that ended the turn, where the server names one."""
    return named if isinstance(named, str) else None


def check_indices(indices: Iterable[int], n: int) -> None:
    """Raises ContractError unless each of the choices 0..n-1 came exactly once."""
    present_indices = sorted(indices)
    if present_indices != list(range(n)):
        raise ContractError(
            f"{n} choices were requested, but the response has choices {present_indices}"
        )


def check_echo(prompt_ids: Sequence[int], echoed: list[int] | None) -> None:
    """Raises Misaligned when the server says it used another prompt than the ids it was sent."""
    if echoed is None or prompt_ids == echoed:
        return
    pairs = zip(prompt_ids, echoed, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(prompt_ids), len(echoed)))
    raise Misaligned(
        f"the server used another prompt: {len(prompt_ids)} ids were sent, it reports "
        f"{len(echoed)}, and they differ from position {at} on"
    )
