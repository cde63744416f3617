"""Tensors of a checkpoint as torch tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.checkpoint.reader import CheckpointReader
from lockstep.engine.weights.digest import NAMES
from lockstep.tokens.errors import CheckpointError

DTYPES = {name: dtype for dtype, name in NAMES.items()}


def read_tensor(reader: CheckpointReader, name: str) -> Tensor:
    """Return one tensor. It may be mapped memory of its file: copy what must outlive changes."""
    tensor = reader.tensors[name]
    if tensor.dtype not in DTYPES:
        raise CheckpointError(
            f"tensor {name!r} of {reader.directory} has dtype {tensor.dtype}, which torch has not"
        )
    data = torch.from_numpy(reader.array(name))
    return data.view(DTYPES[tensor.dtype]).reshape(tensor.shape)
