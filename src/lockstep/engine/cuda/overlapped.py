"""Overlapped scheduling: a decode step runs while the host handles the tokens of the one before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lockstep.engine.cuda.graphs import Decoder, GraphRow, StepInFlight
from lockstep.engine.sampler import Sampled, restricts, uniform
from lockstep.engine.scheduler import Scheduler, Work
from lockstep.engine.sequence import Sequence
from lockstep.engine.weights.weights import Weights
from lockstep.tokens import LogprobMode
from lockstep.tokens.completion import usable


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A launched step, and the sequences of its rows."""

    step: StepInFlight
    sequences: list[Sequence]


class OverlappedDecoder:
    """Launches decode steps, and collects their tokens later.

    A sequence counts as computed from the launch on: whatever is done with its slot afterwards is
    queued behind the step on the device. Where the host must know the tokens first, it collects.
    `take` gets every token; `wipe` every sequence that computed NaN, before its token.
    """

    def __init__(
        self,
        decoder: Decoder,
        scheduler: Scheduler,
        mode: LogprobMode,
        take: Callable[[Sequence, Sampled], None],
        wipe: Callable[[Sequence], None],
    ) -> None:
        self._decoder = decoder
        self._scheduler = scheduler
        self._mode = mode
        self._take = take
        self._wipe = wipe
        self._current: _InFlight | None = None

    @property
    def in_flight(self) -> bool:
        return self._current is not None

    def fits(self, works: list[Work]) -> bool:
        """Whether the kernels can compute all of these works."""
        return all(work.count == 1 and _plain(work.sequence) for work in works)

    def launch(self, weights: Weights, works: list[Work]) -> None:
        """Starts a step that samples the next token of every work."""
        step = self._decoder.launch(weights, [self._row(work) for work in works])
        self._start(_InFlight(step, [work.sequence for work in works]))

    def advance(self) -> None:
        """Collects the step in flight, after launching the next one if the batch stays the same."""
        current = self._current
        if current is not None and self._continues(current.sequences):
            # The token in flight is counted here, though the host has not seen it yet.
            uniforms = [uniform(each.seed, each.generated + 1) for each in current.sequences]
            step = self._decoder.follow(current.step, uniforms)
            self._start(_InFlight(step, current.sequences))
        else:
            self._current = None
        self._hand_on(current)

    def collect(self) -> None:
        """Waits for the step in flight, if there is one, and hands its tokens on."""
        current, self._current = self._current, None
        self._hand_on(current)

    def _start(self, launched: _InFlight) -> None:
        for sequence in launched.sequences:
            sequence.computed += 1
        self._current = launched

    def _hand_on(self, launched: _InFlight | None) -> None:
        if launched is None:
            return
        tokens = list(zip(launched.sequences, launched.step.read(), strict=True))
        for sequence, token in tokens:
            if not usable(token.logprob):
                # Before any is handed on: a failure ends the other choices of its request, too.
                self._wipe(sequence)
        for sequence, token in tokens:
            self._take(sequence, Sampled(*token, ()))

    def _continues(self, sequences: list[Sequence]) -> bool:
        """Whether the same sequences will want one more token, whatever the one in flight is."""
        scheduler = self._scheduler
        if scheduler.has_waiting and len(scheduler.running) < scheduler.slots:
            return False
        return sequences == scheduler.running and all(
            len(each.tokens) + 1 < each.max_total for each in sequences
        )

    def _row(self, work: Work) -> GraphRow:
        sequence = work.sequence
        options = sequence.request.sampling
        return GraphRow(
            slot=work.slot,
            position=sequence.computed,
            token=sequence.tokens[-1],
            uniform=uniform(sequence.seed, sequence.generated),
            temperature=options.temperature,
            processed=(options.logprob_mode or self._mode) == "processed",
        )


def _plain(sequence: Sequence) -> bool:
    """Whether its next token is drawn from the whole distribution of the base model."""
    options = sequence.request.sampling
    return (
        sequence.generated > 0
        and sequence.adapter is None
        and not options.logprobs
        and not restricts(options)
        and sequence.generated >= options.min_tokens
    )
