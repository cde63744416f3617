"""The first element in which a tensor of two checkpoints differs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep.engine.weights.digest import digest_of


@dataclass(frozen=True, slots=True)
class Element:
    """The position of an element, and its value in both tensors."""

    index: str
    a: float
    b: float


def first_element(
    name: str, a: tuple[Path, str | None], b: tuple[Path, str | None]
) -> Element | None:
    """Return the first element of tensor `name` that differs in two directories.

    Each directory has the digest that the tensor must have; None where it does not hold such a
    tensor any more, and where both hold the same.
    """
    first, second = _tensor(a[0], name), _tensor(b[0], name)
    if first is None or second is None or first.shape != second.shape:
        return None
    if a[1] == b[1] or digest_of(first) != a[1] or digest_of(second) != b[1]:
        return None
    # As bits: NaN equals itself, and 0.0 differs from -0.0.
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(first.element_size(), torch.uint8)
    differing = (first.view(bits) != second.view(bits)).nonzero()
    index = tuple(int(at) for at in differing[0])
    count = len(differing)
    where = f"[{', '.join(map(str, index))}] ({count} of {first.numel()} elements differ)"
    return Element(where, float(first[index]), float(second[index]))


def file_digests(directory: Path) -> dict[str, str]:
    """Return the digest of every tensor that a directory holds now, by name."""
    return {
        name: digest_of(_tensor(directory, name))
        for path in sorted(directory.glob("*.safetensors"))
        if not path.name.startswith("probe")
        for name in _names(path)
    }


def _names(path: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def _tensor(directory: Path, name: str) -> Any:
    from safetensors import safe_open

    for path in sorted(directory.glob("*.safetensors")) if directory.is_dir() else ():
        with safe_open(path, framework="pt") as file:
            if name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                return file.get_tensor(name)
    return None
