"""Decoding one step ahead: the next step is under way while the tokens of the last are handled."""

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
class _Air:
    flight: StepInFlight
    sequences: list[Sequence]


class OverlappedDecoder:
    """Launches decode steps and lands them later.

    A sequence counts as computed from the launch on: whatever is done with its slot afterwards is
    queued behind the step on the device. What the host must know first, it lands for.
    """

    def __init__(
        self,
        decoder: Decoder,
        scheduler: Scheduler,
        mode: LogprobMode,
        take: Callable[[Sequence, Sampled], None],
        spoil: Callable[[Sequence], None],
    ) -> None:
        self._decoder = decoder
        self._scheduler = scheduler
        self._mode = mode
        self._take = take
        self._spoil = spoil
        self._air: _Air | None = None

    @property
    def airborne(self) -> bool:
        return self._air is not None

    def fits(self, works: list[Work]) -> bool:
        """Whether the kernels know all that these works ask for."""
        return all(work.count == 1 and _plain(work.sequence) for work in works)

    def launch(self, weights: Weights, works: list[Work]) -> None:
        """Starts the next token of every work."""
        rows = [self._row(work) for work in works]
        flight = self._decoder.launch(weights, rows)
        self._fly(_Air(flight, [work.sequence for work in works]))

    def advance(self) -> None:
        """Lands the step in the air, after the next has been launched if it is the same batch."""
        air = self._air
        if air is not None and self._goes_on(air.sequences):
            uniforms = [uniform(each.seed, each.generated + 1) for each in air.sequences]
            self._fly(_Air(self._decoder.follow(air.flight, uniforms), air.sequences))
        else:
            self._air = None
        self._handle(air)

    def land(self) -> None:
        """Waits for the step in the air, if there is one, and hands its tokens on."""
        air, self._air = self._air, None
        self._handle(air)

    def _fly(self, air: _Air) -> None:
        for sequence in air.sequences:
            sequence.computed += 1
        self._air = air

    def _handle(self, air: _Air | None) -> None:
        if air is None:
            return
        landed = list(zip(air.sequences, air.flight.read(), strict=True))
        for sequence, drawn in landed:
            if not usable(drawn.logprob):
                # Before anything is handed on: a failure takes other choices of its request along.
                self._spoil(sequence)
        for sequence, drawn in landed:
            self._take(sequence, Sampled(*drawn, ()))

    def _goes_on(self, sequences: list[Sequence]) -> bool:
        """Whether the same sequences will want one more token, whatever the one in the air is."""
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
