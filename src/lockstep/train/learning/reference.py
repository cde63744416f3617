"""The reference model that the policy is held to: the starting weights, or a moving average."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lockstep.engine.forward_pass import Ints
from lockstep.engine.weights.published import own_rows
from lockstep.train.config import TrainConfig
from lockstep.train.learning.batch import TrainItem
from lockstep.train.learning.item_logprobs import ItemLogprobs

EMA_DECAY = 0.99


class ReferenceModel:
    """Scores tokens with the reference weights, over the same supports as the policy.

    `model` is a second model with the weights that the run started from, or the policy itself with
    an adapter, which is switched off for the reference.
    """

    def __init__(self, model: Any, config: TrainConfig, scorer: ItemLogprobs) -> None:
        self._model = model
        self._scorer = scorer
        self._has_adapter = bool(config.learner.lora_rank)
        self._decay = (
            (config.reference.decay or EMA_DECAY) if config.reference.kind == "ema" else None
        )
        self._averages: list[Tensor] = []
        if self._decay is not None:
            # In float32: a small change would be lost in the rounding of shorter types.
            self._averages = [own.float().clone() for own in own_rows(model)]

    @torch.no_grad()
    def logprobs(self, items: Sequence[TrainItem], positions: Sequence[Ints]) -> Tensor:
        """Return the reference's logprobs of the tokens at these positions (N,)."""
        without: AbstractContextManager[Any] = nullcontext()
        if self._has_adapter:
            without = self._model.disable_adapter()
        with without:
            return self._scorer.score(items, positions)[0].detach()

    @torch.no_grad()
    def follow(self, model: Any) -> None:
        """Move the average towards the trained weights, after a step."""
        if self._decay is None:
            return
        pairs = zip(self._averages, own_rows(model), strict=True)
        for average, trained in pairs:
            average.lerp_(trained.float(), 1 - self._decay)
        self._copy()

    def state(self) -> list[Tensor]:
        """Return what a resumed run cannot load from elsewhere: the averages."""
        return self._averages

    @torch.no_grad()
    def load_state(self, averages: list[Tensor]) -> None:
        for own, stored in zip(self._averages, averages, strict=True):
            own.copy_(stored)
        self._copy()

    def _copy(self) -> None:
        for own, average in zip(own_rows(self._model), self._averages, strict=True):
            own.copy_(average)
