"""Scoring of weight probes in parallel to the engine's thread, which keeps generating.

On a CPU a probe of a few hundred tokens takes as long as many decode steps. On other devices it
takes milliseconds, and memory for a second cache is scarce, so the engine scores it between steps.
It also does so while paused: the probe then delays no request.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from lockstep.engine import Engine
from lockstep.engine.kv.cache import SlotCache
from lockstep.engine.model.lora import Adapter
from lockstep.engine.scoring import score_sequences
from lockstep.engine.weights.weights import Weights
from lockstep.tokens.errors import Conflict, EngineFailure

SLOTS = 8
"""Memory limit of a probe, in sequences of the engine's full length. More short ones fit."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Logprobs of each sequence, and the name of the weights that gave them."""

    logprobs: list[list[float]]
    weights: str


class Prober:
    """Scorer of probes under the live or the staged weights of one engine, one probe at a time.

    Weights are named by identity and not by label: by this object and their epoch, which no other
    set of weights has, in this or any other process.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._name = secrets.token_hex(8)
        self._staged: weakref.ref[Weights] | None = None
        self._proved: weakref.ref[Weights] | None = None
        self._turn = asyncio.Lock()

    def remember_staged(self, weights: Weights) -> Weights:
        """Store a weak reference, which keeps no memory, to the staged weights; return them."""
        self._staged = weakref.ref(weights)
        return weights

    async def score_all(
        self, sequences: list[list[int]], *, adapter: str | None = None, staged: bool = False
    ) -> Scored:
        """Return the logprob of every token after the first, all under the same weights.

        Raises Conflict when nothing is staged or the weights changed meanwhile, and what
        `Engine.score_all` raises. Staged weights that were scored can be committed as proved.
        """
        engine, core = self._engine, self._engine.core
        weights = self.weights(staged)
        if core.scores_beside and core.state == "running" and sequences:
            core.check_scorable(sequences)
            loaded = None if adapter is None else core.served.adapter(adapter)
            abandoned = threading.Event()
            try:
                async with self._turn:
                    scores = await asyncio.to_thread(
                        self._score, weights, sequences, loaded, abandoned.is_set
                    )
            finally:
                # A cancelled call leaves its thread behind, which then ends after its pass.
                abandoned.set()
        else:
            scores = await engine.score_all(sequences, adapter=adapter, staged=staged)
        if self.weights(staged) is not weights:
            raise Conflict(f"the weights of {weights.version!r} were replaced while being probed")
        if staged and sequences:
            self._proved = weakref.ref(weights)
        return Scored(scores, self.name(weights))

    async def commit_proved(self, proof: str) -> str:
        """Commit the staged weights that were probed; return their version.

        Raises Conflict, and swaps nothing, unless the staged weights are those whose probe returned
        this `proof`; EngineFailure when the engine then serves anything else.
        """
        weights = self.weights(staged=True)
        proved = None if self._proved is None else self._proved()
        if weights is not proved or self.name(weights) != proof:
            raise Conflict(
                f"commit of {proof!r} as proved was requested, but the weights staged as "
                f"{weights.version!r} are not those which that probe was scored on: probe them",
                param="proved",
            )
        # No await between this check and the engine's lock: nothing can change in between.
        version = await self._engine.commit()
        if self._engine.core.served.weights is not weights:
            raise EngineFailure(f"other weights than the proved ones are served as {version!r}")
        return version

    def name(self, weights: Weights) -> str:
        """Return the name of these weights, the `proof` once a probe of them was scored."""
        return f"{self._name}.{weights.epoch}"

    def weights(self, staged: bool) -> Weights:
        """Return the live or the staged weights. Raises Conflict when nothing is staged."""
        if not staged:
            return self._engine.core.served.weights
        weights = None if self._staged is None else self._staged()
        if weights is None or self._engine.staged_version != weights.version:
            raise Conflict("no weights are staged: call stage first")
        return weights

    def _score(
        self,
        weights: Weights,
        sequences: list[list[int]],
        adapter: Adapter | None,
        is_abandoned: Callable[[], bool],
    ) -> list[list[float]]:
        core, options = self._engine.core, self._engine.options
        # The setting is per thread, and this runs in a pool thread.
        torch.set_num_threads(options.threads)
        longest, whole = max(map(len, sequences)), core.cache.k.shape[-2]
        # Size the slots for these sequences. Zeroing slots of the engine's full length would take
        # longer than computing the probe.
        capacity = core.model.arithmetic.keys(longest)
        slots = min(len(sequences), SLOTS * whole // capacity)
        with torch.inference_mode():
            few = replace(options, max_seqs=slots)
            cache = SlotCache(core.config, few, capacity, core.served.dtype)
            return score_sequences(
                core.model,
                weights,
                cache,
                sequences,
                adapter=adapter,
                free=range(cache.slots + 1),
                budget=options.max_batch_tokens,
                is_abandoned=is_abandoned,
            )
