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
    """Rows with options the kernels do not support, sampled by `sampler.sample`."""

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
        """Wait for the tokens and return each with its sequence."""
        tokens = self.step.read()
        if (others := self.others) is not None:
            results = sample(others.logits, others.options)
            for at, sampled in zip(others.at, results, strict=True):
                tokens[at] = sampled
        # The kernels sample only rows that can draw every token.
        vocab = self.step.table.logits.shape[-1]
        for at, sequence in enumerate(self.sequences):
            if sequence.supports is not None and tokens[at].support is None:
                tokens[at] = tokens[at]._replace(support=(vocab, b""))
        return zip(self.sequences, tokens, strict=True)


@dataclass(frozen=True, slots=True)
class _Prefill:
    """Launched prefill work, with the sums of its hidden states by row."""

    works: list[Work]
    sums: Tensor
    finished: torch.cuda.Event | None

    def broken(self) -> set[Sequence]:
        """Return the sequences that computed NaN or infinity."""
        if self.finished is not None:
            self.finished.synchronize()
        if math.isfinite(self.sums.sum().item()):
            return set()
        pieces = self.sums.split([work.count for work in self.works])
        pairs = zip(self.works, pieces, strict=True)
        return {work.sequence for work, sums in pairs if not bool(torch.isfinite(sums).all())}


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A launched step: its decoding sequences and its prefills."""

    decode: _Drawing | None
    prefills: tuple[tuple[_Prefill, _Drawing | None], ...] = ()


class OverlappedRunner:
    """Runner that launches steps as CUDA graphs and collects their tokens later.

    A sequence counts as computed from its launch on, because any later operation on its slot is
    queued behind the step on the device. When the host must know the tokens first, it calls
    `collect`. `take` receives every token. `wipe` receives every sequence that computed NaN, before
    its token.
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
        """The adapters that graphs read, or None when adapters are computed one by one."""
        return self.decoder.bank

    def drop_bank(self) -> None:
        """Compute adapters one by one from now on."""
        self.decoder.bank = self._prefiller.bank = None

    def shapes(self, weights: Weights) -> list[tuple[str, list[int], Callable[[int], object]]]:
        """Return all batch shapes by purpose, each with the function that captures one size."""
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
        """Start a step of these works; return those it cannot compute.

        These are works with adapters in close arithmetic.
        """
        decodes: list[Work] = []
        prefills: list[Work] = []
        adapted: list[Work] = []
        for work in works:
            plain = work.sequence.adapter is None
            if _decodes(work) and (plain or self.bank is not None):
                decodes.append(work)
            else:
                (prefills if plain else adapted).append(work)
        # Launch the longer part last: the tokens of the other are copied while it runs.
        decode = self._decode(weights, decodes) if decodes else None
        batches = [*self._batches(prefills)]
        if self._prefiller.exact:
            # A batch of their own: graphs of prefills without adapters do less work.
            batches += self._batches(adapted)
            adapted = []
        launched = tuple(self._prefill(weights, batch) for batch in batches)
        if decode is not None or launched:
            self._current = _InFlight(decode, launched)
        return adapted

    def advance(self) -> None:
        """Collect the step in flight, after launching the next one if the batch stays the same."""
        current = self._current
        self._current = None
        if current is None:
            return
        decode = current.decode
        if decode is not None and self._continues(current):
            # The host has not seen the token in flight yet, so it is counted by the + 1. The next
            # step starts before it is read: the device takes its token from the step before.
            uniforms = [
                uniform(sequence.seed, sequence.generated + 1) for sequence in decode.sequences
            ]
            step = self.decoder.follow(decode.step, uniforms)
            for sequence in decode.sequences:
                sequence.computed += 1
            self._current = _InFlight(replace(decode, step=step))
        self._deliver(current)

    def collect(self) -> None:
        """Wait for the step in flight, if there is one, and deliver its tokens."""
        current, self._current = self._current, None
        if current is not None:
            self._deliver(current)

    # Launching

    def _decode(self, weights: Weights, works: list[Work]) -> _Drawing:
        options = [self._runner.sampling_row(work.sequence) for work in works]
        rows = [
            _row(row, work.slot, work.sequence.computed, work.sequence.tokens[-1])
            for work, row in zip(works, options, strict=True)
        ]
        adapters = [work.sequence.adapter for work in works]
        drawing = _start_drawing(self.decoder.launch(weights, rows, adapters), works, options)
        for work in works:
            work.sequence.computed += 1
        return drawing

    def _batches(self, works: list[Work]) -> Iterator[list[Work]]:
        """Yield the works in as few runs as possible: one, unless many of them are tiny."""
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
            drawing = _start_drawing(
                self._prefiller.draw(weights, rows, adapters), sampling, options
            )
        for work in works:
            work.sequence.computed += work.count
        # Copy the sums without waiting: whether the prefill computed NaN is read when collecting.
        host, finished = sums, None
        if sums.is_cuda:
            host = torch.empty_like(sums, device="cpu", pin_memory=True)
            host.copy_(sums, non_blocking=True)
            finished = torch.cuda.Event()
            finished.record()
        return _Prefill(works, host, finished), drawing

    # Collecting

    def _deliver(self, launched: _InFlight) -> None:
        """Deliver all tokens of a step, after wiping the slots of broken sequences.

        A failure also ends the other choices of its request, and ending them stores what they
        computed in the prefix cache.
        """
        sampled_tokens = list(launched.decode.read()) if launched.decode is not None else []
        broken = {sequence for sequence, sampled in sampled_tokens if not usable(sampled.logprob)}
        for prefill, drawing in launched.prefills:
            broken_prefills = prefill.broken()
            tokens = dict.fromkeys(broken_prefills, Sampled(0, math.nan, 0, ()))
            if drawing is not None:
                tokens |= {
                    sequence: sampled
                    for sequence, sampled in drawing.read()
                    if sequence not in broken_prefills
                }
            broken |= {seq for seq, sampled in tokens.items() if not usable(sampled.logprob)}
            sampled_tokens += tokens.items()
        for sequence in broken:
            self._wipe(sequence)
        for sequence, sampled in sampled_tokens:
            self._take(sequence, sampled)

    def _continues(self, step: _InFlight) -> bool:
        """Return whether the same sequences need one more token, whatever the one in flight is."""
        scheduler, decode = self._scheduler, step.decode
        if decode is None or step.prefills or decode.others is not None:
            return False
        # A waiting request could start now, so the batch must be planned again.
        if scheduler.has_waiting and len(scheduler.running) < scheduler.slots:
            return False
        return decode.sequences == scheduler.running and all(
            len(sequence.tokens) + 1 < sequence.max_total for sequence in decode.sequences
        )


def _decodes(work: Work) -> bool:
    """Return whether the work computes a single token, sampled by this engine."""
    return work.count == 1 and work.samples and work.sequence.generated > 0


def _segment(work: Work) -> Segment:
    sequence = work.sequence
    tokens = sequence.tokens[sequence.computed : sequence.computed + work.count]
    return Segment.whole(work.slot, sequence.computed, tokens, sequence.adapter)


def _start_drawing(step: StepInFlight, works: list[Work], options: list[SamplingRow]) -> _Drawing:
    at = [at for at, row in enumerate(options) if not _kernels_sample(row)]
    others = None
    if at:
        # Copy the logits now: another run of the same step may overwrite the buffer.
        logits = step.table.logits[: len(works)]
        if len(at) < len(works):
            logits = logits.index_select(0, index_on(at, logits.device))
        others = _OtherRows(at, [options[row] for row in at], logits.float())
    return _Drawing(step, [work.sequence for work in works], others)


def _row(row: SamplingRow, slot: int, position: int, token: int) -> GraphRow:
    return GraphRow(
        slot=slot,
        position=position,
        token=token,
        uniform=row.uniform,
        temperature=row.sampling.temperature,
        processed=row.mode == "processed",
        tops=row.sampling.logprobs if _kernels_sample(row) else 0,
    )


def _kernels_sample(row: SamplingRow) -> bool:
    """Return whether the kernels can sample this row: only a temperature may shape it."""
    return not row.processing.edits and not truncates(row.sampling)
