"""AdamW over this rank's rows of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.train.config import LearnerConfig
from lockstep.train.learning.optimizer import Optimizer
from lockstep.train.ranks.gathered import gathered, merged


class ShardedOptimizer(Optimizer):
    """The optimizer of one rank. Its tensors are rows of those of one process, bit for bit.

    The norm of the gradients is that of whole tensors, because sums over parts would round
    differently.
    """

    def __init__(self, parameters: Sequence[Any], learner: LearnerConfig, group: Any) -> None:
        # Plain tensors that share the memory of FSDP2's parameters.
        rows = [own.to_local().detach().requires_grad_() for own in parameters]
        super().__init__(rows, learner)
        self._sharded = list(parameters)
        self._group = group

    def zero_grad(self) -> None:
        super().zero_grad()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Make FSDP2 store the next gradients instead of adding them to the last ones."""
        for own in self._sharded:
            own.grad = None

    def clip(self) -> float:
        for rows, own in zip(self._parameters, self._sharded, strict=True):
            rows.grad = None if own.grad is None else own.grad.to_local()
        return super().clip()

    def _limit_norm(self) -> float:
        present = [
            (own, rows.grad)
            for own, rows in zip(self._sharded, self._trained, strict=True)
            if rows.grad is not None
        ]
        numbered = ((str(at), grad, tuple(own.shape)) for at, (own, grad) in enumerate(present))
        norms = {name: torch.linalg.vector_norm(whole).cpu() for name, whole in gathered(numbered)}
        every = merged(norms, self._group)
        ordered = torch.stack([every[str(at)] for at in range(len(present))])
        norm = torch.linalg.vector_norm(ordered.to(present[0][1].device))
        torch.nn.utils.clip_grads_with_norm_(self._trained, self._max_norm, norm)
        return float(norm)

    def shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of the whole parameters."""
        return [tuple(own.shape) for own in self._sharded]

    def rows(self) -> list[Tensor]:
        """Return this rank's rows of each parameter."""
        return self._parameters
