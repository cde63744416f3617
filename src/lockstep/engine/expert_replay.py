"""Routed-expert replay: route the trainer's tokens to the experts that the engine chose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.tokens import Sample
from lockstep.tokens.errors import BadExperts

UNKNOWN = -1


class ExpertReplay:
    """Hooks on the routers of a transformers mixture-of-experts model.

    Within `of`, recorded expert ids replace those that the router chose. Their weights are computed
    from the trainer's own router logits, so that gradients reach the router.
    """

    def __init__(self, model: Any) -> None:
        self._routers = [
            module
            for module in model.modules()
            if type(module).__name__.endswith("Router") and hasattr(module, "top_k")
        ]
        self._recorded: Tensor | None = None
        for column, router in enumerate(self._routers):
            router.register_forward_hook(self._hook(column))

    @property
    def layers(self) -> int:
        return len(self._routers)

    @contextmanager
    def of(
        self, samples: Sequence[Sample], width: int | None, device: torch.device
    ) -> Iterator[None]:
        """Replay the experts of these samples within the block.

        The samples are padded to `width` tokens each, or packed without padding if it is None.
        """
        self._recorded = self._stack(samples, width).to(device)
        try:
            yield
        finally:
            self._recorded = None

    def _stack(self, samples: Sequence[Sample], width: int | None) -> Tensor:
        """Return expert ids (layers, all tokens, top_k), UNKNOWN where none were recorded."""
        top_k = int(self._routers[0].top_k)
        rows = []
        for sample in samples:
            if sample.experts is None:
                raise BadExperts(
                    "a sample has no routed experts: set rollout.experts to true, or "
                    "learner.replay_experts to false"
                )
            ids = sample.experts.numpy()
            if ids.shape[1:] != (self.layers, top_k):
                raise BadExperts(
                    f"a token has routed experts of shape {ids.shape[1:]}, but the model has "
                    f"{self.layers} routers of {top_k}"
                )
            row_TLK = np.full((width or len(sample.token_ids), *ids.shape[1:]), UNKNOWN, np.int64)
            start = sample.experts.start
            row_TLK[start : start + len(ids)] = ids
            rows.append(row_TLK)
        return torch.from_numpy(np.concatenate(rows)).transpose(0, 1).contiguous()

    def _hook(self, column: int) -> Any:
        def replace(router: Any, _: Any, output: Any) -> Any:
            if self._recorded is None:
                return None
            logits, own_weights, own_ids = output
            recorded = self._recorded[column]
            ids = torch.where(recorded == UNKNOWN, own_ids, recorded)
            # The same operations in the same order as in the router: equal ids give equal bits.
            probs = torch.softmax(logits, dim=-1, dtype=torch.float)
            weights = probs.gather(-1, ids)
            if router.norm_topk_prob:
                weights = weights / weights.sum(dim=-1, keepdim=True)
            return logits, weights.to(own_weights.dtype), ids

        return replace
