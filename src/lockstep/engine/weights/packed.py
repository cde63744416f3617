"""The packed tensors of one set of weights, and the memory that they lie in."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

ALIGNED = 128
"""Values that the place of a tensor in joined memory is a multiple of: kernels want 16 bytes."""
SWAPPED = 64 << 20
"""Values that are exchanged at a time: so many are there three times for a moment."""


class PackedTensors(dict[str, Tensor]):
    """Packed tensors by name. `whole` is the one piece of memory that they all lie in, if they do:
    then a few copies exchange all of them with others of the same layout."""

    whole: Tensor | None = None

    @classmethod
    def empty(
        cls, shapes: Mapping[str, tuple[int, ...]], device: str, dtype: torch.dtype, *, joined: bool
    ) -> PackedTensors:
        """Memory for tensors of these shapes: `joined` to one piece, or each its own."""
        if not joined:
            return cls(
                {n: torch.empty(shape, dtype=dtype, device=device) for n, shape in shapes.items()}
            )
        sizes = [-(-math.prod(shape) // ALIGNED) * ALIGNED for shape in shapes.values()]
        # Zeros, as what lies between two tensors is checked to be finite with them.
        whole = torch.zeros(sum(sizes), dtype=dtype, device=device)
        packed = cls()
        for (name, shape), part in zip(shapes.items(), whole.split(sizes), strict=True):
            packed[name] = part[: math.prod(shape)].view(shape)
        packed.whole = whole
        return packed

    def exchange(self, other: PackedTensors) -> None:
        """Exchanges the numbers; every tensor stays where it is. Those that both share stay too."""
        pairs = [(tensor, other[name]) for name, tensor in self.items()]
        if self.whole is not None and other.whole is not None:
            # A copy for every tensor takes longer to launch than to run, and requests wait for it.
            pairs = [*zip(self.whole.split(SWAPPED), other.whole.split(SWAPPED), strict=True)]
        for here, there in pairs:
            if here is not there:
                numbers = here.clone()
                here.copy_(there)
                there.copy_(numbers)
