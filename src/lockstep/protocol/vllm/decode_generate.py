"""Answers in vLLM's token-in/token-out dialect, whole and streamed, as completions.

Read alike: vLLM 0.32's entries (`token_id`, weight_versions, base64 .npy experts), prime-rl's and
Dynamo's (`"token": "token_id:N"`, experts as an object), and Lockstep's own, which has all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from lockstep.protocol.common.base64_extract import (
    NEEDLE,
    Base64Text,
    ExtractedBody,
    extract_base64,
)
from lockstep.protocol.common.decode_error import NO_ERROR, raise_stated
from lockstep.protocol.common.prompt_logprobs import PromptField, decode_prompt_logprobs
from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.common.response import (
    BareLogprobEntry,
    LogprobEntry,
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
    stop_token_of,
    tops_of,
)
from lockstep.protocol.common.routed_experts import ExpertsField, read_experts
from lockstep.tokens import Completion, LogprobMode, PromptLogprob, RoutedExperts, VersionSpan
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
    weight_versions: list[VersionSpan] | None = None
    routed_experts: ExpertsField = None
    logprobs: VllmLogprobs[E] | None = None


class VllmResponse(msgspec.Struct, Generic[E]):
    """Both the whole answer and one streamed event: a chunk is an answer with less in it."""

    request_id: str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptField | None = None
    logprob_mode: LogprobMode | None = None
    temperature: float | None = None
    worker: str | None = None
    adapter: str | None = None
    error: msgspec.Raw = NO_ERROR
    choices: list[VllmChoice[E]] = []


AnyLogprobs = (
    VllmLogprobs[BareLogprobEntry] | VllmLogprobs[LogprobEntry] | VllmLogprobs[RankedLogprobEntry]
)
AnyChoice = VllmChoice[BareLogprobEntry] | VllmChoice[LogprobEntry] | VllmChoice[RankedLogprobEntry]
AnyAnswer = (
    VllmResponse[BareLogprobEntry] | VllmResponse[LogprobEntry] | VllmResponse[RankedLogprobEntry]
)
LEAN = msgspec.json.Decoder(VllmResponse[BareLogprobEntry])
PLAIN = msgspec.json.Decoder(VllmResponse[LogprobEntry])
RANKED = msgspec.json.Decoder(VllmResponse[RankedLogprobEntry])
Tokens = tuple[int, list[int], list[float]]
"""The index of a choice, new ids of it, and their logprobs."""
UNSPLICED = ExtractedBody(b"", ())
ONCE = ("request_id", "prompt_token_ids", "prompt_logprobs", "logprob_mode", "temperature",
        "worker", "adapter")  # fmt: skip


def decode_generate(body: bytes | bytearray | ExtractedBody, reading: Reading) -> list[Completion]:
    """The completions of a whole answer, in order of their index.

    Raises a ContractError that names the position wherever the answer breaks the token contract,
    and the typed error that the server states in a body with `error`.
    """
    spliced = extract_base64(body, most=reading.ask.sampling.n)
    return _completions(_decode(spliced, reading), spliced, reading)


class GenerateStreamDecoder:
    """Collects the events of one stream; the completions are those of the whole answer."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._whole: AnyAnswer = VllmResponse[LogprobEntry]()
        self._choices: dict[int, AnyChoice] = {}
        self._values: list[Base64Text] = []

    def feed(self, event: bytes | bytearray) -> list[StreamDelta]:
        """The tokens that this event brought. Raises what the server states as an error."""
        return list(self.deltas([event]))

    def deltas(self, events: Sequence[bytes | bytearray]) -> Iterator[StreamDelta]:
        """The same for events that came together; each is checked before its tokens are given."""
        for tokens in self.collect(events):
            for index, ids, values in tokens:
                # Copies: what a choice collects must not grow in a delta that somebody keeps.
                yield StreamDelta(index, list(ids), list(values))

    def collect(self, events: Sequence[bytes | bytearray]) -> Iterator[list[Tokens]]:
        """What each of the events brought, checked when it is taken. It raises what `feed` does.

        For those who need no copies: the lists are still to grow.
        """
        for chunk, spliced in _decode_all(events, self._reading):
            for field in ONCE:
                if (value := getattr(chunk, field)) is not None:
                    setattr(self._whole, field, value)
            yield [self._add(choice, spliced) for choice in chunk.choices]

    def _add(self, new: AnyChoice, spliced: ExtractedBody) -> Tokens:
        index = new.index
        ids = new.token_ids
        if ids is None:
            ids = ids_of(ids, f"a streamed event of choice {index}")
        values = _values(new, ids, nulls=self._reading.ask.allow_nonfinite)
        if isinstance(new.routed_experts, str):
            new.routed_experts = self._keep(new.routed_experts, spliced)
        elif new.routed_experts is not None:
            new.routed_experts.data = self._keep(new.routed_experts.data, spliced)
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
            old.stop_reason = new.stop_reason
        if new.weight_versions is not None:
            old.weight_versions = new.weight_versions
        if new.routed_experts is not None:
            old.routed_experts = new.routed_experts
        return index, ids, values

    def _keep(self, field: str, spliced: ExtractedBody) -> str:
        self._values.append(spliced.text(field))
        return f":{len(self._values) - 1}"

    def finish(self) -> list[Completion]:
        """The completions. Raises MissingFinish when the stream ended before every choice did."""
        n = self._reading.ask.sampling.n
        for index in range(n):
            if index not in self._choices or self._choices[index].finish_reason is None:
                raise MissingFinish(f"the stream ended before choice {index} of {n} had finished")
        self._whole.choices = list(self._choices.values())  # type: ignore[assignment]
        spliced = ExtractedBody(b"", tuple(self._values))
        return _completions(self._whole, spliced, self._reading)


def _decode_all(
    events: Sequence[bytes | bytearray], reading: Reading
) -> Iterator[tuple[AnyAnswer, ExtractedBody]]:
    """Each event decoded; all in one go where that works, which is several times cheaper."""
    answers = _decode_lines(events, reading) if len(events) > 1 else None
    if answers is None:
        for event in events:
            spliced = extract_base64(event)
            yield _decode(spliced, reading), spliced
        return
    for answer in answers:
        raise_stated(answer.error)
        yield answer, UNSPLICED


def _decode_lines(
    events: Sequence[bytes | bytearray], reading: Reading
) -> Sequence[AnyAnswer] | None:
    """All events at once, or None when one of them needs a closer look."""
    lines = b"\n".join(events)
    if NEEDLE in lines:
        return None
    decoder: msgspec.json.Decoder[Any] = LEAN if b'"token_id"' in lines else PLAIN
    if reading.ask.sampling.logprobs:
        decoder = RANKED
    try:
        answers: list[Any] = decoder.decode_lines(lines)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if len(answers) != len(events) or (decoder is LEAN and not all(map(_by_id, answers))):
        return None
    return answers


def _decode(spliced: ExtractedBody, reading: Reading) -> AnyAnswer:
    body = spliced.json
    answer: AnyAnswer
    if reading.ask.sampling.logprobs:
        answer = decode_response(RANKED, body)
    elif b'"token_id"' in body and _by_id(answer := decode_response(LEAN, body)):
        pass
    else:
        answer = decode_response(PLAIN, body)
    raise_stated(answer.error)
    return answer


def _extend(known: AnyLogprobs, new: AnyLogprobs) -> None:
    if new.content:
        known.content = _joined(known.content, new.content)  # type: ignore[misc]
    if new.values:
        known.values = _joined(known.values, new.values)
    if new.ranks:
        known.ranks = _joined(known.ranks, new.ranks)


def _joined(known: list[T] | None, new: list[T]) -> list[T]:
    """`known` grown by `new`, in place."""
    if known is None:
        return new
    known += new
    return known


def _by_id(answer: VllmResponse[BareLogprobEntry]) -> bool:
    """Whether the entries do name their tokens by id, as far as the first of each choice shows."""
    for choice in answer.choices:
        if choice.logprobs is not None and choice.logprobs.content:
            first = choice.logprobs.content[0]
            if first is not None and first.token_id is None:
                return False
    return True


def _completions(answer: AnyAnswer, spliced: ExtractedBody, reading: Reading) -> list[Completion]:
    ask = reading.ask
    check_indices((choice.index for choice in answer.choices), ask.sampling.n)
    check_echo(ask.prompt_ids, answer.prompt_token_ids)
    prompt = prompt_of(answer.prompt_logprobs, reading)
    done = [_completion(choice, answer, prompt, spliced, reading) for choice in answer.choices]
    return sorted(done, key=lambda completion: completion.index)


def _completion(
    choice: AnyChoice,
    answer: AnyAnswer,
    prompt: list[PromptLogprob | None] | None,
    spliced: ExtractedBody,
    reading: Reading,
) -> Completion:
    ask = reading.ask
    ids = ids_of(choice.token_ids, f"choice {choice.index} of the answer")
    content = None if choice.logprobs is None else choice.logprobs.content
    finish = finish_of(choice.finish_reason)
    mode = answer.logprob_mode or reading.logprob_mode
    if ask.sampling.logprob_mode not in (None, mode):
        raise ContractError(
            f"{ask.sampling.logprob_mode!r} logprobs were asked for, but {mode!r} ones came"
        )
    return Completion(
        token_ids=ids,
        logprobs=_values(choice, ids, nulls=ask.allow_nonfinite),
        prompt_ids=ask.prompt_ids,
        finish=finish,
        versions=spans_of(choice.weight_versions, reading.version, len(ids)),
        logprob_mode=mode,
        temperature=(
            ask.sampling.temperature if answer.temperature is None else answer.temperature
        ),
        index=choice.index + reading.index,
        request_id=ask.request_id or answer.request_id or "",
        stop_token=stop_token_of(choice.stop_reason, finish, ids, ask),
        top_logprobs=tops_of(content, ask.sampling.logprobs),
        ranks=ranks_of(content) or (choice.logprobs.ranks if choice.logprobs else None) or None,
        prompt_logprobs=prompt,
        worker=answer.worker or reading.worker,
        adapter=answer.adapter or reading.adapter,
        experts=_experts(choice, spliced, ask, len(ids)),
        allow_nonfinite=ask.allow_nonfinite,
    )


def _experts(
    choice: AnyChoice, spliced: ExtractedBody, ask: GenerateRequest, sampled: int
) -> RoutedExperts | None:
    if choice.routed_experts is None and ask.experts_start is None:
        return None
    total = len(ask.prompt_ids) + sampled
    return read_experts(choice.routed_experts, spliced, total=total, asked=ask.experts_start)


def _values(choice: AnyChoice, ids: list[int], *, nulls: bool) -> list[float]:
    """The logprobs of a choice in either form. Raises Misaligned or BadLogprob."""
    found = choice.logprobs
    if found is None or found.values is None:
        return logprobs_of(ids, None if found is None else found.content, nulls=nulls)
    if len(found.values) != len(ids):
        raise Misaligned(f"{len(ids)} token ids but {len(found.values)} logprobs")
    return numbers(found.values, nulls=nulls)


def prompt_of(field: PromptField | None, reading: Reading) -> list[PromptLogprob | None] | None:
    """The prompt logprobs, if they were asked for. Raises BadLogprob when they did not come."""
    ask = reading.ask
    top = ask.sampling.prompt_logprobs
    if top is None:
        return None
    if field is None:
        raise BadLogprob("prompt logprobs were asked for, but the answer has none")
    return decode_prompt_logprobs(
        ask.prompt_ids, field, top=top, allow_nonfinite=ask.allow_nonfinite
    )
