"""AdamW over the trained weights, with float32 copies and a scaled loss for float16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.train.config import LearnerConfig

FIRST_SCALE = 2.0**12
LARGEST_SCALE = 2.0**16
STEPS_PER_DOUBLING = 100


class Optimizer:
    """AdamW on parameters. Gradients are those of a loss multiplied by `scale`.

    float16 has neither the range for small gradients nor the precision for small updates: there
    `scale` is large, and AdamW works on float32 copies of the weights.
    """

    def __init__(self, parameters: Sequence[Tensor], learner: LearnerConfig) -> None:
        self._parameters = list(parameters)
        self._is_half = learner.dtype == "float16"
        self._trained = (
            [own.detach().float().requires_grad_() for own in parameters]
            if self._is_half
            else self._parameters
        )
        self._max_norm = learner.max_grad_norm
        self._adamw = torch.optim.AdamW(
            self._trained, lr=learner.lr, betas=learner.betas, weight_decay=learner.weight_decay
        )
        self.scale = FIRST_SCALE if self._is_half else 1.0
        self._finite_steps = 0

    def zero_grad(self) -> None:
        for own in self._parameters:
            own.grad = None

    def clip(self) -> float:
        """Limit the norm of the gradients, and return what it was."""
        if self._is_half:
            for own, copy in zip(self._parameters, self._trained, strict=True):
                copy.grad = None if own.grad is None else own.grad.float() / self.scale
        return self._limit_norm()

    def _limit_norm(self) -> float:
        return float(torch.nn.utils.clip_grad_norm_(self._trained, self._max_norm))

    def lower_scale(self) -> bool:
        """Halve the scale after an overflow; return False if that cannot help."""
        if self.scale <= 1:
            return False
        self.scale, self._finite_steps = self.scale / 2, 0
        return True

    def step(self, rate: float) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        if not self._is_half:
            return
        with torch.no_grad():
            for own, copy in zip(self._parameters, self._trained, strict=True):
                own.copy_(copy)
        self._finite_steps += 1
        if self._finite_steps % STEPS_PER_DOUBLING == 0:
            self.scale = min(2 * self.scale, LARGEST_SCALE)

    def tensors(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return AdamW's moments and the float32 copies, given the names of the parameters."""
        tensors: dict[str, Tensor] = {}
        for name, trained in zip(names, self._trained, strict=True):
            moments = self._adamw.state.get(trained, {}).items()
            tensors |= {f"{name}.{key}": own for key, own in moments if isinstance(own, Tensor)}
            if self._is_half:
                tensors[f"{name}.copy"] = trained.detach()
        return tensors

    def state(self) -> dict[str, Any]:
        state = {"adamw": self._adamw.state_dict()}
        if not self._is_half:
            return state
        copies = [own.detach() for own in self._trained]
        return {**state, "copies": copies, "scale": [self.scale, self._finite_steps]}

    def load_state(self, state: dict[str, Any]) -> None:
        self._adamw.load_state_dict(state["adamw"])
        if self._is_half:
            self.scale, self._finite_steps = state["scale"]
            with torch.no_grad():
                for own, stored in zip(self._trained, state["copies"], strict=True):
                    own.copy_(stored)
