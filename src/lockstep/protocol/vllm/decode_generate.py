"""Reads responses in vLLM's token-in/token-out dialect, whole and streamed, as completions.

Read alike: vLLM 0.32's entries (`token_id`, weight_versions, base64 .npy experts), prime-rl's and
Dynamo's (`"token": "token_id:N"`, experts as an object), and Lockstep's own, which has all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, Generic, TypeVar

import msgspec

from lockstep.protocol.common.decode_error import NO_ERROR, raise_stated
from lockstep.protocol.common.prompt_logprobs import PromptField, decode_prompt_logprobs
from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.common.response import (
    BareLogprobEntry,
    LogprobEntry,
    Provenance,
    RankedLogprobEntry,
    Reading,
    StreamDelta,
    check_echo,
    check_indices,
    decode_response,
    finish_of,
    ids_of,
    logprobs_of,
    numbers,
    ranks_of,
    spans_of,
    stop_string_of,
    stop_token_of,
    tops_of,
)
from lockstep.protocol.common.routed_experts import ExpertsField, read_experts
from lockstep.protocol.common.sampling_mask import SupportField, read_support
from lockstep.protocol.json.base64_extract import (
    NEEDLE,
    Base64Text,
    ExtractedBody,
    extract_base64,
)
from lockstep.tokens import (
    Completion,
    LogprobMode,
    PromptLogprob,
    RoutedExperts,
    Shaping,
    VersionSpan,
)
from lockstep.tokens.errors import BadLogprob, ContractError, Misaligned, MissingFinish

E = TypeVar("E", BareLogprobEntry, LogprobEntry, RankedLogprobEntry)
T = TypeVar("T")


class VllmLogprobs(msgspec.Struct, Generic[E]):
    """Entries, or Lockstep's flat form: bare numbers in the order of the ids."""

    content: list[E | None] | None = None
    values: list[float | None] | None = None
    ranks: list[int] | None = None


class VllmChoice(msgspec.Struct, Generic[E]):
    index: int = 0
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    stop_tokens: int | None = None
    weight_versions: list[VersionSpan] | None = None
    routed_experts: ExpertsField = None
    sampling_mask: SupportField = None
    logprobs: VllmLogprobs[E] | None = None


class VllmResponse(msgspec.Struct, Generic[E]):
    """Both the whole response and one streamed event: a chunk is a response with less in it."""

    request_id: str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptField | None = None
    logprob_mode: LogprobMode | None = None
    temperature: float | None = None
    shaping: Shaping | None = None
    worker: str | None = None
    adapter: str | None = None
    error: msgspec.Raw = NO_ERROR
    choices: list[VllmChoice[E]] = []


AnyLogprobs = (
    VllmLogprobs[BareLogprobEntry] | VllmLogprobs[LogprobEntry] | VllmLogprobs[RankedLogprobEntry]
)
AnyChoice = VllmChoice[BareLogprobEntry] | VllmChoice[LogprobEntry] | VllmChoice[RankedLogprobEntry]
AnyResponse = (
    VllmResponse[BareLogprobEntry] | VllmResponse[LogprobEntry] | VllmResponse[RankedLogprobEntry]
)
LEAN = msgspec.json.Decoder(VllmResponse[BareLogprobEntry])
PLAIN = msgspec.json.Decoder(VllmResponse[LogprobEntry])
RANKED = msgspec.json.Decoder(VllmResponse[RankedLogprobEntry])
Tokens = tuple[int, list[int], list[float]]
"""The index of a choice, new ids of it, and their logprobs."""
NOTHING_EXTRACTED = ExtractedBody(b"", ())
NO_EXPERTS = b'"routed_experts":null'
ONCE = ("request_id", "prompt_token_ids", "prompt_logprobs", "logprob_mode", "temperature",
        "shaping", "worker", "adapter")  # fmt: skip
NO_VALUES = (None,) * len(ONCE)
_once_fields = attrgetter(*ONCE)


def decode_generate(body: bytes | bytearray | ExtractedBody, reading: Reading) -> list[Completion]:
    """The completions of a whole response, in order of their index.

    Raises a ContractError that names the position wherever the response breaks the token contract,
    and the typed error that the server states in a body with `error`.
    """
    if isinstance(body, ExtractedBody):
        extracted = body
    elif _has_experts(body):
        # vLLM returns them without being asked, if it was started to.
        extracted = extract_base64(body, most=reading.request.sampling.n)
    else:
        extracted = ExtractedBody(body, ())
    return _completions(_decode(extracted, reading), extracted, reading)


class GenerateStreamDecoder:
    """Collects the events of one stream; the completions are those of the whole response."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._whole: AnyResponse = VllmResponse[LogprobEntry]()
        self._choices: dict[int, AnyChoice] = {}
        self._values: list[Base64Text] = []
        self._made = Provenance.of(reading)

    def feed(self, event: bytes | bytearray) -> list[StreamDelta]:
        """The tokens that this event brought. Raises what the server states as an error."""
        return list(self.deltas([event]))

    def deltas(self, events: Sequence[bytes | bytearray]) -> Iterator[StreamDelta]:
        """The same for events that came together; each is checked before it is yielded."""
        for tokens in self.collect(events):
            for index, ids, values in tokens:
                # Copies: a delta that the caller keeps must not grow with the choice.
                yield StreamDelta(index, list(ids), list(values), self._provenance(index))

    def collect(self, events: Sequence[bytes | bytearray]) -> Iterator[list[Tokens]]:
        """Yield the tokens of each event, checked when it is taken. Raises as `feed` does.

        For those who need no copies: the lists are still to grow.
        """
        for chunk, extracted in _decode_all(events, self._reading):
            if (values := _once_fields(chunk)) != NO_VALUES:
                for field, value in zip(ONCE, values, strict=True):
                    if value is not None:
                        setattr(self._whole, field, value)
            yield [self._add(choice, extracted) for choice in chunk.choices]

    def _add(self, new: AnyChoice, extracted: ExtractedBody) -> Tokens:
        index = new.index
        ids = new.token_ids
        if ids is None:
            ids = ids_of(ids, f"a streamed event of choice {index}")
        values = _values(new, ids, nulls=self._reading.request.allow_nonfinite)
        if isinstance(new.routed_experts, str):
            new.routed_experts = self._keep(new.routed_experts, extracted)
        elif new.routed_experts is not None:
            new.routed_experts.data = self._keep(new.routed_experts.data, extracted)
        old = self._choices.get(index)
        if old is None:
            self._choices[index] = new
            return index, ids, values
        if old.token_ids:
            old.token_ids += ids
        else:
            old.token_ids = ids
        if old.logprobs is None:
            old.logprobs = new.logprobs
        elif new.logprobs is not None:
            _extend(old.logprobs, new.logprobs)
        if new.finish_reason is not None:
            old.finish_reason = new.finish_reason
        if new.stop_reason is not None:
            old.stop_reason, old.stop_tokens = new.stop_reason, new.stop_tokens
        if new.weight_versions is not None:
            old.weight_versions = new.weight_versions
        if new.routed_experts is not None:
            old.routed_experts = new.routed_experts
        if isinstance(old.sampling_mask, list) and isinstance(new.sampling_mask, list):
            old.sampling_mask += new.sampling_mask  # vLLM sends the rows of each event's tokens
        elif new.sampling_mask is not None:
            old.sampling_mask = new.sampling_mask
        return index, ids, values

    def _provenance(self, index: int) -> Provenance:
        spans, made = self._choices[index].weight_versions, self._made
        version = spans[-1].version if spans else made.version
        mode, worker = self._whole.logprob_mode or made.logprob_mode, self._whole.worker
        if (
            version != made.version
            or mode != made.logprob_mode
            or worker not in (None, made.worker)
        ):
            made = replace(made, version=version, logprob_mode=mode, worker=worker or made.worker)
            self._made = made
        return made

    def _keep(self, field: str, extracted: ExtractedBody) -> str:
        self._values.append(extracted.text(field))
        return f":{len(self._values) - 1}"

    def finish(self) -> list[Completion]:
        """The completions. Raises MissingFinish when the stream ended before every choice did."""
        n = self._reading.request.sampling.n
        for index in range(n):
            if index not in self._choices or self._choices[index].finish_reason is None:
                raise MissingFinish(f"the stream ended before choice {index} of {n} had finished")
        self._whole.choices = list(self._choices.values())  # type: ignore[assignment]
        extracted = ExtractedBody(b"", tuple(self._values))
        return _completions(self._whole, extracted, self._reading)


def _decode_all(
    events: Sequence[bytes | bytearray], reading: Reading
) -> Iterator[tuple[AnyResponse, ExtractedBody]]:
    """Each event decoded; all in one go where that works, which is several times cheaper."""
    responses = _decode_lines(events, reading) if len(events) > 1 else None
    if responses is None:
        for event in events:
            extracted = extract_base64(event) if _has_experts(event) else ExtractedBody(event, ())
            yield _decode(extracted, reading), extracted
        return
    for response in responses:
        if response.error is not NO_ERROR:
            raise_stated(response.error)
        yield response, NOTHING_EXTRACTED


def _decode_lines(
    events: Sequence[bytes | bytearray], reading: Reading
) -> Sequence[AnyResponse] | None:
    """All events at once, or None when one of them needs a closer look."""
    lines = b"\n".join(events)
    if _has_experts(lines):
        return None
    decoder: msgspec.json.Decoder[Any] = LEAN if b'"token_id"' in lines else PLAIN
    if reading.request.sampling.logprobs:
        decoder = RANKED
    try:
        responses: list[Any] = decoder.decode_lines(lines)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if len(responses) != len(events) or (decoder is LEAN and not all(map(_by_id, responses))):
        return None
    return responses


def _has_experts(body: bytes | bytearray) -> bool:
    """Whether there may be experts to take out: some servers name them in every event."""
    return NEEDLE in body and body.count(NEEDLE) != body.count(NO_EXPERTS)


def _decode(extracted: ExtractedBody, reading: Reading) -> AnyResponse:
    body = extracted.json
    response: AnyResponse
    if reading.request.sampling.logprobs:
        response = decode_response(RANKED, body)
    elif b'"token_id"' in body and _by_id(response := decode_response(LEAN, body)):
        pass
    else:
        response = decode_response(PLAIN, body)
    if response.error is not NO_ERROR:
        raise_stated(response.error)
    return response


def _extend(collected: AnyLogprobs, new: AnyLogprobs) -> None:
    if new.content:
        collected.content = _joined(collected.content, new.content)  # type: ignore[misc]
    if new.values:
        collected.values = _joined(collected.values, new.values)
    if new.ranks:
        collected.ranks = _joined(collected.ranks, new.ranks)


def _joined(collected: list[T] | None, new: list[T]) -> list[T]:
    """`known` grown by `new`, in place."""
    if collected is None:
        return new
    collected += new
    return collected


def _by_id(response: VllmResponse[BareLogprobEntry]) -> bool:
    """Whether the entries do name their tokens by id, as far as the first of each choice shows."""
    for choice in response.choices:
        if choice.logprobs is not None and choice.logprobs.content:
            first = choice.logprobs.content[0]
            if first is not None and first.token_id is None:
                return False
    return True


def _completions(
    response: AnyResponse, extracted: ExtractedBody, reading: Reading
) -> list[Completion]:
    request = reading.request
    check_indices((choice.index for choice in response.choices), request.sampling.n)
    check_echo(request.prompt_ids, response.prompt_token_ids)
    prompt = prompt_of(response.prompt_logprobs, reading)
    completions = [
        _completion(choice, response, prompt, extracted, reading) for choice in response.choices
    ]
    return sorted(completions, key=lambda completion: completion.index)


def _completion(
    choice: AnyChoice,
    response: AnyResponse,
    prompt: list[PromptLogprob | None] | None,
    extracted: ExtractedBody,
    reading: Reading,
) -> Completion:
    request = reading.request
    ids = ids_of(choice.token_ids, f"choice {choice.index} of the response")
    content = None if choice.logprobs is None else choice.logprobs.content
    finish = finish_of(choice.finish_reason)
    mode = response.logprob_mode or reading.logprob_mode
    if request.sampling.logprob_mode not in (None, mode):
        raise ContractError(
            f"{request.sampling.logprob_mode!r} logprobs were requested, but {mode!r} ones came"
        )
    return Completion(
        token_ids=ids,
        logprobs=_values(choice, ids, nulls=request.allow_nonfinite),
        prompt_ids=request.prompt_ids,
        finish=finish,
        versions=spans_of(choice.weight_versions, reading.version, len(ids)),
        logprob_mode=mode,
        temperature=(
            request.sampling.temperature if response.temperature is None else response.temperature
        ),
        shaping=response.shaping or request.sampling.shaping(),
        index=choice.index + reading.index,
        request_id=request.request_id or response.request_id or "",
        stop_token=stop_token_of(choice.stop_reason, finish, ids, request),
        stop_reason=stop_string_of(choice.stop_reason),
        stop_tokens=choice.stop_tokens,
        top_logprobs=tops_of(content, request.sampling.logprobs),
        ranks=ranks_of(content) or (choice.logprobs.ranks if choice.logprobs else None) or None,
        prompt_logprobs=prompt,
        worker=response.worker or reading.worker,
        adapter=response.adapter or reading.adapter,
        experts=_experts(choice, extracted, request, len(ids)),
        support=read_support(choice.sampling_mask),
        allow_nonfinite=request.allow_nonfinite,
    )


def _experts(
    choice: AnyChoice, extracted: ExtractedBody, request: GenerateRequest, sampled: int
) -> RoutedExperts | None:
    if choice.routed_experts is None and request.experts_start is None:
        return None
    total = len(request.prompt_ids) + sampled
    return read_experts(
        choice.routed_experts, extracted, total=total, first_row=request.first_experts_row
    )


def _values(choice: AnyChoice, ids: list[int], *, nulls: bool) -> list[float]:
    """The logprobs of a choice in either form. Raises Misaligned or BadLogprob."""
    logprobs = choice.logprobs
    if logprobs is None or logprobs.values is None:
        return logprobs_of(ids, None if logprobs is None else logprobs.content, nulls=nulls)
    if len(logprobs.values) != len(ids):
        raise Misaligned(f"{len(ids)} token ids but {len(logprobs.values)} logprobs")
    return numbers(logprobs.values, nulls=nulls)


def prompt_of(field: PromptField | None, reading: Reading) -> list[PromptLogprob | None] | None:
    """The prompt logprobs, if they were requested. Raises BadLogprob when they did not come."""
    request = reading.request
    top = request.sampling.prompt_logprobs
    if top is None:
        return None
    if field is None:
        raise BadLogprob("prompt logprobs were requested, but the response has none")
    return decode_prompt_logprobs(
        request.prompt_ids, field, top=top, allow_nonfinite=request.allow_nonfinite
    )
