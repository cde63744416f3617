"""Staging of a delta on the live weights: only the delta is read, not its chain."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from lockstep.checkpoint.delta.delta_reader import apply_link, not_as_written
from lockstep.checkpoint.delta.record import DeltaLink, check_of
from lockstep.checkpoint.tensor_names import (
    DERIVED,
    EMBEDDING,
    HEAD,
    check_names,
    tied_head_differs,
)
from lockstep.engine.weights.digest import NAMES
from lockstep.engine.weights.upload import check_finite
from lockstep.engine.weights.weights import Weights

THREADS = 4
"""Tensors changed at once. Unpacking, copying and checking release the GIL."""


def applies_to(link: DeltaLink, live: Weights) -> bool:
    """Return whether the live weights are the base of the delta, byte for byte as it was saved."""
    if live.digest != link.record.base.digest:
        return False
    dtype = NAMES[live.embed.dtype]
    # Weights that are served in another dtype than they were saved in are not the base's bytes.
    return all(delta.tensor.dtype == dtype for delta in link.record.tensors.values())


def with_delta(live: Weights, link: DeltaLink, version: str) -> Weights:
    """Return a new set: a copy of the live weights, changed by the delta. `applies_to` holds.

    Raises CheckpointError for a result that is not what was written; `live` stays unchanged.
    """
    layout, deltas = live.layout, link.record.tensors
    names = [name for name in deltas if not name.endswith(DERIVED)]
    check_names(names, layout.places, str(link.directory), tied=layout.config.tied)
    if layout.config.tied and HEAD in deltas:
        head, embedding = deltas[HEAD], deltas[EMBEDDING]
        if (head.tensor, head.check) != (embedding.tensor, embedding.check):
            raise tied_head_differs(str(link.directory))
        names.remove(HEAD)
    packed = live.packed.copied()

    def change(name: str) -> None:
        tensor = deltas[name].tensor
        place = layout.check(name, tensor.shape, live.embed.dtype)
        _change(link, name, place.view(packed[place.packed]))

    with ThreadPoolExecutor(THREADS, thread_name_prefix="delta") as pool:
        list(pool.map(change, names))
    digests: Mapping[str, str] = {
        name: digest for name, digest in link.digests.items() if not name.endswith(DERIVED)
    }
    return Weights(layout, packed, version, digests=digests)


def _change(link: DeltaLink, name: str, target: Tensor) -> None:
    """Change one tensor in place and check all of it, also if nothing changed in this step."""
    here = target if target.device.type == "cpu" else target.cpu()
    data = here.view(torch.uint8).view(-1).numpy()
    changed = apply_link(link, name, data) is not None
    if check_of(data) != link.record.tensors[name].check:
        raise not_as_written(name, link)
    if changed:
        check_finite(name, here)
        if here is not target:
            target.copy_(here)
