"""Reduction of gradients in the order of the passes, whatever rank computed which pass."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule


class PassOrder:
    """How many ranks take part in the current round of passes: the first `active` ones."""

    active = 0


class OrderedSum:
    """FSDP2's reduce-scatter for one module: adds the gradients of rank 0, then those of rank 1,
    and so on, to the sum of the rounds before.

    Sums of floats depend on their order. One process adds the gradients of one pass after another,
    and so does this: rank r computes pass r of each round. A reduce-scatter of gloo or NCCL moves
    as many bytes, but adds in an order of its own.
    """

    def __init__(self, order: PassOrder) -> None:
        self._order = order
        self._sum: Tensor | None = None

    def reset(self) -> None:
        """Start a new sum, before the first round of a step."""
        self._sum = None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        parts = received.view(group.size(), -1)[: self._order.active]
        if self._sum is None:
            output_tensor.copy_(parts[0])
            parts = parts[1:]
        else:
            output_tensor.copy_(self._sum)
        for part in parts:
            output_tensor += part
        self._sum = output_tensor  # the memory of the gradients, not a copy


def reduce_in_order(model: Any, order: PassOrder) -> list[OrderedSum]:
    """Let every sharded module of the model reduce its gradients by an OrderedSum; return them."""
    sums = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            own = OrderedSum(order)
            module.set_custom_reduce_scatter(own)  # type: ignore[arg-type]
            # Losses are divided by the tokens of all ranks already.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            sums.append(own)
    return sums
