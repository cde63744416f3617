"""Overlapped scheduling: a step runs on the device while the host handles the one before."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from lockstep.engine.cuda.graphs import Decoder
from lockstep.engine.cuda.kernels.adapters import AdapterBank
from lockstep.engine.cuda.prefill import Prefiller
from lockstep.engine.cuda.table import GraphRow, StepInFlight, buckets, powers
from lockstep.engine.kv.cache import index_on
from lockstep.engine.model.model import Segment
from lockstep.engine.model_runner import ModelRunner
from lockstep.engine.processing import truncates
from lockstep.engine.sampler import Sampled, SamplingRow, sample, uniform
from lockstep.engine.scheduler import Scheduler, Work
from lockstep.engine.sequence import Sequence
from lockstep.engine.weights.weights import Weights
from lockstep.tokens.completion import usable


@dataclass(frozen=True, slots=True)
class _OtherRows:
    """Rows whose options the kernels do not know: drawn by `sampler.sample` from their logits."""

    at: list[int]
    options: list[SamplingRow]
    logits: Tensor


@dataclass(frozen=True, slots=True)
class _Drawing:
    """A launched draw, and the sequences of its rows."""

    step: StepInFlight
    sequences: list[Sequence]
    others: _OtherRows | None

    def read(self) -> Iterator[tuple[Sequence, Sampled]]:
        """The token of each sequence."""
        tokens = self.step.read()
        if (others := self.others) is not None:
            drawn = sample(others.logits, others.options)
            for at, sampled in zip(others.at, drawn, strict=True):
                tokens[at] = sampled
        return zip(self.sequences, tokens, strict=True)


@dataclass(frozen=True, slots=True)
class _Prefill:
    """Launched prefill work, with the sums of its hidden states by row."""

    works: list[Work]
    sums: Tensor
    finished: torch.cuda.Event | None

    def broken(self) -> set[Sequence]:
        """The sequences that computed NaN or infinity."""
        if self.finished is not None:
            self.finished.synchronize()
        if math.isfinite(self.sums.sum().item()):
            return set()
        pieces = self.sums.split([work.count for work in self.works])
        pairs = zip(self.works, pieces, strict=True)
        return {work.sequence for work, sums in pairs if not bool(torch.isfinite(sums).all())}


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A launched step: sequences that decode, and those whose prompts are computed."""

    decode: _Drawing | None
    prefills: tuple[tuple[_Prefill, _Drawing | None], ...] = ()


class OverlappedRunner:
    """Launches steps by graphs, and collects their tokens later.

    A sequence counts as computed from the launch on: whatever is done with its slot afterwards is
    queued behind the step on the device. Where the host must know the tokens first, it collects.
    `take` gets every token; `wipe` every sequence that computed NaN, before its token.
    """

    def __init__(
        self,
        decoder: Decoder,
        prefiller: Prefiller,
        scheduler: Scheduler,
        runner: ModelRunner,
        take: Callable[[Sequence, Sampled], None],
        wipe: Callable[[Sequence], None],
    ) -> None:
        self.decoder = decoder
        self._prefiller = prefiller
        self._scheduler = scheduler
        self._runner = runner
        self._take = take
        self._wipe = wipe
        self._current: _InFlight | None = None

    @property
    def in_flight(self) -> bool:
        return self._current is not None

    @property
    def bank(self) -> AdapterBank | None:
        """What graphs read adapters from; None where those are computed one by one."""
        return self.decoder.bank

    def drop_bank(self) -> None:
        """Has adapters computed one by one from now on."""
        self.decoder.bank = self._prefiller.bank = None

    def shapes(self, weights: Weights) -> list[tuple[str, list[int], Callable[[int], object]]]:
        """All batch shapes by what they are for, and what captures one of them."""
        decoder, prefiller, slots = self.decoder, self._prefiller, self._scheduler.slots
        shapes: list[tuple[str, list[int], Callable[[int], object]]] = [
            ("decoding", buckets(slots), lambda size: decoder.table(weights, size)),
            ("prompt tokens", prefiller.sizes, lambda size: prefiller.table(weights, size)),
            ("first tokens", powers(slots), lambda size: prefiller.head(weights, size)),
        ]
        if self.bank is not None:
            capture = partial(decoder.table, weights, adapted=True)
            shapes.append(("decoding under adapters", buckets(slots), capture))
            prompts = partial(prefiller.table, weights, adapted=True)
            shapes.append(("prompt tokens under adapters", prefiller.sizes, prompts))
        return shapes

    def launch(self, weights: Weights, works: list[Work]) -> list[Work]:
        """Starts a step of these works; returns those it cannot compute, which have adapters in
        close arithmetic."""
        decodes: list[Work] = []
        prefills: list[Work] = []
        adapted: list[Work] = []
        for work in works:
            plain = work.sequence.adapter is None
            if _decodes(work) and (plain or self.bank is not None):
                decodes.append(work)
            else:
                (prefills if plain else adapted).append(work)
        # The longer part last: while it runs, tokens of the other are on their way.
        decode = self._decode(weights, decodes) if decodes else None
        batches = [*self._batches(prefills)]
        if self._prefiller.exact:
            # Apart from the others, whose graphs do less.
            batches += self._batches(adapted)
            adapted = []
        launched = tuple(self._prefill(weights, batch) for batch in batches)
        if decode is not None or launched:
            self._current = _InFlight(decode, launched)
        return adapted

    def advance(self) -> None:
        """Collects the step in flight, after launching the next one if the batch stays the same."""
        current = self._current
        self._current = None
        if current is None:
            return
        decode = current.decode
        if decode is not None and self._continues(current):
            # The token in flight is counted here, though the host has not seen it yet.
            uniforms = [uniform(each.seed, each.generated + 1) for each in decode.sequences]
            step = self.decoder.follow(decode.step, uniforms)
            for sequence in decode.sequences:
                sequence.computed += 1
            self._current = _InFlight(replace(decode, step=step))
        self._hand_on(current)

    def collect(self) -> None:
        """Waits for the step in flight, if there is one, and hands its tokens on."""
        current, self._current = self._current, None
        if current is not None:
            self._hand_on(current)

    # Launching

    def _decode(self, weights: Weights, works: list[Work]) -> _Drawing:
        options = [self._runner.sampling_row(work.sequence) for work in works]
        rows = [
            _row(row, work.slot, work.sequence.computed, work.sequence.tokens[-1])
            for work, row in zip(works, options, strict=True)
        ]
        adapters = [work.sequence.adapter for work in works]
        drawing = _drawing(self.decoder.launch(weights, rows, adapters), works, options)
        for work in works:
            work.sequence.computed += 1
        return drawing

    def _batches(self, works: list[Work]) -> Iterator[list[Work]]:
        """The works in as few runs as they fit in: one, unless many of them are tiny."""
        while works:
            count = len(works)
            while count > 1 and not self._prefiller.fits([_segment(w) for w in works[:count]]):
                count //= 2
            yield works[:count]
            works = works[count:]

    def _prefill(self, weights: Weights, works: list[Work]) -> tuple[_Prefill, _Drawing | None]:
        segments = [_segment(work) for work in works]
        hidden, sums = self._prefiller.run(weights, segments)
        rows: list[GraphRow] = []
        sampling: list[Work] = []
        options: list[SamplingRow] = []
        end = 0
        for work in works:
            start, end = end, end + work.count
            if work.sequence.wants_prompt_logprobs:
                self._runner.score_prompt(weights, work, hidden, start)
            if work.samples:
                options.append(self._runner.sampling_row(work.sequence))
                rows.append(_row(options[-1], work.slot, end - 1, 0))
                sampling.append(work)
        drawing = None
        if rows:
            adapters = [work.sequence.adapter for work in sampling]
            drawing = _drawing(self._prefiller.draw(weights, rows, adapters), sampling, options)
        for work in works:
            work.sequence.computed += work.count
        host, finished = sums, None
        if sums.is_cuda:
            host = torch.empty_like(sums, device="cpu", pin_memory=True)
            host.copy_(sums, non_blocking=True)
            finished = torch.cuda.Event()
            finished.record()
        return _Prefill(works, host, finished), drawing

    # Collecting

    def _hand_on(self, launched: _InFlight) -> None:
        """Hands all tokens on, after what broke was wiped: a failure ends the other choices of its
        request too, and what they have computed is then kept as a prefix."""
        drawn = list(launched.decode.read()) if launched.decode is not None else []
        broken = {sequence for sequence, sampled in drawn if not usable(sampled.logprob)}
        for prefill, drawing in launched.prefills:
            gone = prefill.broken()
            tokens = dict.fromkeys(gone, Sampled(0, math.nan, 0, ()))
            if drawing is not None:
                tokens |= {each: sampled for each, sampled in drawing.read() if each not in gone}
            broken |= {each for each, sampled in tokens.items() if not usable(sampled.logprob)}
            drawn += tokens.items()
        for sequence in broken:
            self._wipe(sequence)
        for sequence, sampled in drawn:
            self._take(sequence, sampled)

    def _continues(self, step: _InFlight) -> bool:
        """Whether the same sequences will want one more token, whatever the one in flight is."""
        scheduler, decode = self._scheduler, step.decode
        if decode is None or step.prefills or decode.others is not None:
            return False
        if scheduler.has_waiting and len(scheduler.running) < scheduler.slots:
            return False
        return decode.sequences == scheduler.running and all(
            len(each.tokens) + 1 < each.max_total for each in decode.sequences
        )


def _decodes(work: Work) -> bool:
    """Whether only its last token is missing, which was sampled here."""
    return work.count == 1 and work.samples and work.sequence.generated > 0


def _segment(work: Work) -> Segment:
    sequence = work.sequence
    tokens = sequence.tokens[sequence.computed : sequence.computed + work.count]
    return Segment.whole(work.slot, sequence.computed, tokens, sequence.adapter)


def _drawing(step: StepInFlight, works: list[Work], options: list[SamplingRow]) -> _Drawing:
    at = [at for at, row in enumerate(options) if not _known(row)]
    others = None
    if at:
        # Taken at once: another run of the same step may draw from the same buffer.
        logits = step.table.logits[: len(works)]
        if len(at) < len(works):
            logits = logits.index_select(0, index_on(at, logits.device))
        others = _OtherRows(at, [options[each] for each in at], logits.float())
    return _Drawing(step, [work.sequence for work in works], others)


def _row(row: SamplingRow, slot: int, position: int, token: int) -> GraphRow:
    return GraphRow(
        slot=slot,
        position=position,
        token=token,
        uniform=row.uniform,
        temperature=row.sampling.temperature,
        processed=row.mode == "processed",
        tops=row.sampling.logprobs if _known(row) else 0,
    )


def _known(row: SamplingRow) -> bool:
    """Whether the kernels draw as this row wants: from the whole distribution, tempered or not."""
    return not row.processing.edits and not truncates(row.sampling)
