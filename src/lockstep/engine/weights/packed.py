"""The packed tensors of one set of weights, and the memory that holds them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

ALIGNMENT = 128
"""Alignment of a tensor in joined memory, in values. Kernels need 16 bytes."""
SWAP_VALUES = 64 << 20
"""Values exchanged at a time. This many exist three times for a moment."""


class PackedTensors(dict[str, Tensor]):
    """Packed tensors by name. `whole` is the single allocation of all of them, if any.

    With it, a few large copies exchange two sets of the same layout.
    """

    whole: Tensor | None = None

    @classmethod
    def empty(
        cls, shapes: Mapping[str, tuple[int, ...]], device: str, dtype: torch.dtype, *, joined: bool
    ) -> PackedTensors:
        """Return memory for tensors of these shapes, in one allocation if `joined`."""
        if not joined:
            return cls(
                {n: torch.empty(shape, dtype=dtype, device=device) for n, shape in shapes.items()}
            )
        sizes = [-(-math.prod(shape) // ALIGNMENT) * ALIGNMENT for shape in shapes.values()]
        # Zeros: the padding between tensors is checked to be finite together with them.
        whole = torch.zeros(sum(sizes), dtype=dtype, device=device)
        packed = cls()
        for (name, shape), part in zip(shapes.items(), whole.split(sizes), strict=True):
            packed[name] = part[: math.prod(shape)].view(shape)
        packed.whole = whole
        return packed

    def copied(self) -> PackedTensors:
        """Return a copy in memory of its own, in one allocation if these are."""
        if self.whole is None:
            return PackedTensors({name: tensor.clone() for name, tensor in self.items()})
        copy = PackedTensors()
        copy.whole = self.whole.clone()
        for name, tensor in self.items():
            copy[name] = copy.whole.as_strided(
                tensor.shape, tensor.stride(), tensor.storage_offset()
            )
        return copy

    def exchange(self, other: PackedTensors) -> None:
        """Exchange the values with another set. No tensor moves, and shared tensors are skipped."""
        pairs = [(tensor, other[name]) for name, tensor in self.items()]
        if self.whole is not None and other.whole is not None:
            # One copy per tensor would take longer to launch than to run, while requests wait.
            pairs = [
                *zip(self.whole.split(SWAP_VALUES), other.whole.split(SWAP_VALUES), strict=True)
            ]
        for here, there in pairs:
            if here is not there:
                numbers = here.clone()
                here.copy_(there)
                there.copy_(numbers)
