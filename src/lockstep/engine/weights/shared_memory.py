"""Weights over POSIX shared memory: a trainer writes one block, workers on its host read it.

The writer owns the block, which exists until `free_shared` or the end of the writing process.
Readers map it read-only and never remove it.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lockstep.engine.weights.broadcast import DTYPES
from lockstep.protocol.control.worker import ALIGNMENT, PlacedTensor, TensorSpec, placed
from lockstep.tokens.errors import BadRequest, NotFound, Unavailable, UnsupportedField

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,200}")
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
FILES = Path("/dev/shm")
"""Directory of the blocks on Linux. Other systems have none."""


@contextmanager
def shared_tensors(
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
) -> Iterator[tuple[str, list[TensorSpec]]]:
    """Write tensors to shared memory (`write_shared`) and free it after the block."""
    name, specs = write_shared(tensors)
    try:
        yield name, specs
    finally:
        free_shared(name)


def write_shared(
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
) -> tuple[str, list[TensorSpec]]:
    """Copy tensors into a new block; return its name and the specs that `Source` takes.

    Call `free_shared` when no worker needs it any more. Raises BadRequest for a dtype that cannot
    be sent, Unavailable when shared memory is full.
    """
    items = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
    if not items:
        raise BadRequest("there are no tensors to share: give at least one", param="tensors")
    specs = [
        TensorSpec(name, DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
        for name, tensor in items
    ]
    places = placed(specs)
    size = places[-1].offset + specs[-1].nbytes
    block = _create(size)
    try:
        whole = np.ndarray(size, np.uint8, buffer=block.buf)
        for place, spec, (_, tensor) in zip(places, specs, items, strict=True):
            flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
            whole[place.offset : place.offset + spec.nbytes] = flat.numpy()
        del whole  # a mapping with views of it cannot be closed
    except BaseException:
        block.unlink()
        raise
    block.close()
    return block.name.lstrip("/"), specs


def free_shared(name: str) -> bool:
    """Remove a block of this process; return whether it existed. Readers keep their mapping."""
    try:
        block = SharedMemory(_check_name(name))
    except FileNotFoundError:
        return False
    block.close()
    block.unlink()
    return True


def read_shared(name: str, tensors: Sequence[PlacedTensor]) -> Iterator[tuple[str, Tensor]]:
    """Return an iterator over copies of the tensors.

    Raises NotFound when there is no such block and BadRequest when a tensor is not within it, both
    at the call and not at the first tensor.
    """
    block = _attach(name)
    try:
        for place in tensors:
            _check_place(place, name, len(block))
    except BaseException:
        block.close()
        raise
    return _copy_tensors(block, tensors)


def _copy_tensors(
    block: mmap.mmap, tensors: Sequence[PlacedTensor]
) -> Iterator[tuple[str, Tensor]]:
    try:
        for place in tensors:
            nbytes = place.nbytes
            data = np.frombuffer(block, np.uint8, nbytes, place.offset).copy()
            yield place.name, torch.from_numpy(data).view(DTYPES[place.dtype]).view(place.shape)
    finally:
        block.close()


def _check_place(place: PlacedTensor, name: str, size: int) -> None:
    if place.offset < 0 or place.offset % ALIGNMENT:
        raise BadRequest(
            f"offset of {place.name!r} is {place.offset}: expected a multiple of {ALIGNMENT}",
            param="tensors",
        )
    end = place.offset + place.nbytes
    if end > size:
        raise BadRequest(
            f"tensor {place.name!r} ends at byte {end} of the shared memory {name!r}, which has "
            f"{size} bytes",
            param="tensors",
        )


def _create(size: int) -> SharedMemory:
    block = SharedMemory(create=True, size=size)
    file = FILES / block.name.lstrip("/")
    try:
        if file.exists():
            # Allocate now. Otherwise the pages are only reserved, and on a full system the first
            # write to one kills the process with SIGBUS.
            with file.open("r+b") as handle:
                os.posix_fallocate(handle.fileno(), 0, size)
    except OSError as error:
        block.close()
        block.unlink()
        raise Unavailable(
            f"shared memory has no room for {size} bytes ({error.strerror}): enlarge {FILES}, or "
            "send the weights another way"
        ) from None
    return block


def _attach(name: str) -> mmap.mmap:
    # SharedMemory maps the block for writing, and up to Python 3.12 its resource tracker removes
    # the block when the reader exits.
    try:
        import _posixshmem  # type: ignore[import-not-found]
    except ImportError:
        raise UnsupportedField(
            "this system has no POSIX shared memory: send the weights another way",
            param="shared_name",
        ) from None
    try:
        handle = _posixshmem.shm_open("/" + _check_name(name), os.O_RDONLY, mode=0o600)
    except FileNotFoundError:
        raise NotFound(
            f"there is no shared memory {name!r} on this host: the writer has freed it, or is on "
            "another host",
            param="shared_name",
        ) from None
    except OSError as error:
        raise BadRequest(
            f"shared memory {name!r} cannot be read: {error.strerror}", param="shared_name"
        ) from None
    try:
        return mmap.mmap(handle, os.fstat(handle).st_size, prot=mmap.PROT_READ)
    except ValueError:
        raise BadRequest(f"shared memory {name!r} is empty", param="shared_name") from None
    finally:
        os.close(handle)


def _check_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise BadRequest(
            f"shared_name is {name!r}: expected letters, digits, '.', '_' or '-'",
            param="shared_name",
        )
    return name
