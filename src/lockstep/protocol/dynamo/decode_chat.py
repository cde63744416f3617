"""Decoder of Dynamo's chat responses: token data in `nvext`, preferably in engine_data.

The engine's own record in engine_data takes precedence over the frontend's echo. The frontend
reports an engine's `abort` as `stop`; engine_data.finish_reason, or a stop without any of the
requested stop tokens, reveals it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from lockstep.protocol.common.decode_error import NO_ERROR, raise_stated
from lockstep.protocol.common.prompt_logprobs import PromptField
from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.common.response import (
    RankedLogprobEntry,
    Reading,
    StreamDelta,
    check_echo,
    check_indices,
    check_named,
    decode_response,
    finish_of,
    ids_of,
    logprobs_of,
    numbers,
    present,
    spans_of,
    stop_token_of,
    tops_of,
)
from lockstep.protocol.common.routed_experts import ExpertsField, read_experts
from lockstep.protocol.json.base64_extract import ExtractedBody, extract_base64
from lockstep.protocol.vllm.decode_generate import prompt_of
from lockstep.protocol.vllm.encode_generate import refuse_scoring
from lockstep.tokens import Completion, Finish, Shaping, VersionSpan
from lockstep.tokens.errors import ContractError, Misaligned, MissingFinish


class DynamoLogprobs(msgspec.Struct):
    content: list[RankedLogprobEntry | None] | None = None


class DynamoChoice(msgspec.Struct):
    index: int = 0
    finish_reason: str | None = None
    logprobs: DynamoLogprobs | None = None


class DynamoEngineData(msgspec.Struct):
    """The worker's own record; Lockstep's adds finish_reason, versions, mode, temperature."""

    completion_token_ids: list[int] | None = None
    completion_logprobs: list[float | None] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptField | None = None
    routed_experts: ExpertsField = None
    finish_reason: str | None = None
    stop_reason: Any = None
    weight_version: str | int | None = None
    weight_versions: list[VersionSpan] | None = None
    logprob_mode: Any = None
    temperature: float | None = None
    shaping: Shaping | None = None
    adapter: str | None = None


class DynamoWorkerId(msgspec.Struct):
    decode_worker_id: int | None = None


class DynamoExtension(msgspec.Struct):
    engine_data: DynamoEngineData | None = None
    completion_token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptField | None = None
    routed_experts: ExpertsField = None
    worker_id: DynamoWorkerId | None = None


class DynamoResponse(msgspec.Struct):
    """The whole response, or one streamed event."""

    id: str | None = None
    choices: list[DynamoChoice] = []
    nvext: DynamoExtension | None = None
    prompt_logprobs: PromptField | None = None
    error: msgspec.Raw = NO_ERROR


DECODER = msgspec.json.Decoder(DynamoResponse)


def decode_dynamo(body: bytes | bytearray | ExtractedBody, reading: Reading) -> Completion:
    """Return the completion of a whole response to a request for one choice.

    Raises a ContractError with the position where the response violates the token contract.
    """
    extracted = extract_base64(body, most=2)
    return _completion(_decode(extracted), extracted, reading)


class DynamoStreamDecoder:
    """Collector of the events of one stream; frontend ids are deltas, engine_data comes last."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._whole = DynamoResponse(nvext=DynamoExtension())
        self._extracted = ExtractedBody(b"", ())

    def feed(self, event: bytes | bytearray) -> list[StreamDelta]:
        """Return the tokens of this event. Raises the error that the server states, if any."""
        extracted = extract_base64(event, most=2)
        chunk = _decode(extracted)
        whole, extension = self._whole, self._whole.nvext or DynamoExtension()
        whole.id = chunk.id or whole.id
        whole.prompt_logprobs = chunk.prompt_logprobs or whole.prompt_logprobs
        ids: list[int] | None = None
        if chunk.nvext is not None:
            ids, chunk.nvext.completion_token_ids = chunk.nvext.completion_token_ids, None
            for field in DynamoExtension.__struct_fields__:
                if (value := getattr(chunk.nvext, field)) is not None:
                    setattr(extension, field, value)
            if extracted.values:
                self._extracted = extracted
        if ids is not None:
            if extension.completion_token_ids is None:
                extension.completion_token_ids = []
            extension.completion_token_ids += ids
        return [self._add(choice, ids) for choice in chunk.choices]

    def _add(self, new: DynamoChoice, ids: list[int] | None) -> StreamDelta:
        content = None if new.logprobs is None else new.logprobs.content
        collected = list(ids or ())
        values = [entry.logprob for entry in content or () if entry and entry.logprob is not None]
        delta = StreamDelta(new.index, collected, values if len(values) == len(collected) else [])
        if not self._whole.choices:
            self._whole.choices.append(new)
            return delta
        old = self._whole.choices[0]
        check_indices([new.index], 1)
        old.finish_reason = new.finish_reason or old.finish_reason
        if old.logprobs is None or old.logprobs.content is None:
            old.logprobs = new.logprobs
        elif content:
            old.logprobs.content += content
        return delta

    def finish(self) -> list[Completion]:
        """Return the completion. Raises MissingFinish if the stream ended before the choice did."""
        if not self._whole.choices or self._whole.choices[0].finish_reason is None:
            raise MissingFinish("the stream ended without a finish reason")
        return [_completion(self._whole, self._extracted, self._reading)]


def _decode(extracted: ExtractedBody) -> DynamoResponse:
    response = decode_response(DECODER, extracted.json)
    raise_stated(response.error)
    return response


def _completion(response: DynamoResponse, extracted: ExtractedBody, reading: Reading) -> Completion:
    request = reading.request
    check_indices((choice.index for choice in response.choices), 1)
    choice = response.choices[0]
    extension = response.nvext or DynamoExtension()
    engine = extension.engine_data or DynamoEngineData()
    stated = finish_of(choice.finish_reason)
    ids = _first(engine.completion_token_ids, extension.completion_token_ids)
    ids = ids_of(ids, "nvext of the response")
    content = None if choice.logprobs is None else choice.logprobs.content
    check_echo(request.prompt_ids, _first(engine.prompt_token_ids, extension.prompt_token_ids))
    finish = (
        finish_of(engine.finish_reason) if engine.finish_reason else _doubted(stated, ids, request)
    )
    version = reading.version if engine.weight_version is None else str(engine.weight_version)
    mode = engine.logprob_mode or reading.logprob_mode
    if mode not in ("raw", "processed"):
        raise ContractError(f"engine_data.logprob_mode is {mode!r}, expected raw or processed")
    prompt = _first(engine.prompt_logprobs, extension.prompt_logprobs, response.prompt_logprobs)
    if engine.temperature is None:  # only Lockstep's worker reports it
        refuse_scoring(request, "this engine behind Dynamo")
    worker = extension.worker_id.decode_worker_id if extension.worker_id else None
    return Completion(
        token_ids=ids,
        logprobs=_logprobs(ids, engine, content, request),
        prompt_ids=request.prompt_ids,
        finish=finish,
        versions=spans_of(engine.weight_versions, version, len(ids)),
        logprob_mode=mode,
        # Dynamo forwards 32-bit floats; the engine knows the value it sampled with.
        temperature=_first(engine.temperature, request.sampling.temperature),
        shaping=engine.shaping or request.sampling.shaping(),
        index=reading.index,
        request_id=request.request_id or response.id or "",
        stop_token=stop_token_of(engine.stop_reason, finish, ids, request),
        top_logprobs=tops_of(content, request.sampling.logprobs),
        prompt_logprobs=prompt_of(prompt, reading),
        worker=reading.worker if worker is None else str(worker),
        adapter=engine.adapter or reading.adapter,
        experts=read_experts(
            _first(engine.routed_experts, extension.routed_experts),
            extracted,
            total=len(request.prompt_ids) + len(ids),
            first_row=request.experts_start,
        ),
        allow_nonfinite=request.allow_nonfinite,
    )


def _logprobs(
    ids: list[int],
    engine: DynamoEngineData,
    content: list[RankedLogprobEntry | None] | None,
    request: GenerateRequest,
) -> list[float]:
    """Return the engine's own float64 numbers, else the frontend's float32 echo."""
    values = engine.completion_logprobs
    if values is None:
        return logprobs_of(ids, content, nulls=request.allow_nonfinite)
    if len(values) != len(ids):
        raise Misaligned(f"{len(ids)} token ids but {len(values)} logprobs")
    if content:
        # The frontend may cut its echo at an EOS; up to there it must name the same ids.
        check_named(ids[: len(content)], present(content)[: len(ids)])
    return numbers(values, nulls=request.allow_nonfinite)


def _doubted(stated: Finish, ids: list[int], request: GenerateRequest) -> Finish:
    """Return `abort` for a `stop` without a requested stop token at the end: it hides an abort."""
    stops = request.sampling.stop_token_ids
    hidden = stated == "stop" and stops and (not ids or ids[-1] not in stops)
    return "abort" if hidden else stated


def _first(*candidates: Any) -> Any:
    """Return the first value that is not None; an empty list counts."""
    return next((candidate for candidate in candidates if candidate is not None), None)
