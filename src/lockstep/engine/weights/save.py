"""Writing of safetensors files, with digests computed from the bytes as they are written.

Each piece of a tensor is copied from its device once. Threads write and hash it while the next
pieces are copied, so nothing is read back and nothing waits for the disk until the end.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.digest import LENGTH, tensor_hash
from lockstep.checkpoint.manifest import FileRecord
from lockstep.engine.weights.digest import NAMES
from lockstep.tokens.errors import CheckpointError

Update = Callable[[memoryview], object]
SaveFile = Callable[..., None]
"""Takes the arguments of `safetensors.torch.save_file`."""
PIECE = 16 << 20
"""Bytes copied, hashed and written at a time."""
PIECES = 4
"""Pieces in flight at once."""
SYNC_BYTES = 128 << 20
"""Bytes between calls of fsync, so that little is left to sync at the end."""
SAVE_FUNCTION = "safe_save_file"
"""Name of the function that transformers' `save_pretrained` calls for each file."""
_replacing = threading.Lock()


@dataclass(frozen=True, slots=True)
class SavedFiles:
    """Records of written files by name, and the digests of their tensors."""

    files: dict[str, FileRecord] = field(default_factory=dict)
    tensors: dict[str, str] = field(default_factory=dict)

    def save_file(
        self,
        tensors: Mapping[str, Tensor],
        filename: str | os.PathLike[str],
        metadata: Mapping[str, str] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Write one file, as `safetensors.torch.save_file` does, and record its digests.

        Floats are written as `dtype`, cast piece by piece.
        """
        typed = [(name, tensor, saved_dtype(tensor, dtype)) for name, tensor in tensors.items()]
        # Widest dtypes first, so that every tensor starts at a multiple of its value size.
        items = sorted(typed, key=lambda item: (-item[2].itemsize, item[0]))
        with open(filename, "wb", buffering=0) as file, _Writer(file) as writer:
            writer.add(memoryview(_header(items, metadata)))
            digests = {}
            for name, tensor, kind in items:
                digests[name] = tensor_hash(type_name(name, kind), tensor.shape)
                writer.add_tensor(tensor, kind, digests[name].update)
            self.files[Path(filename).name] = writer.finish()
        for name, digest in digests.items():
            self.tensors[name] = digest.hexdigest()[:LENGTH]


@contextmanager
def saving_through(save_file: SaveFile) -> Iterator[None]:
    """Make transformers write its files by `save_file` within the block.

    `save_pretrained` decides how a model is named and split into files, and offers no other hook to
    write them. If a version of it calls another function, that one writes the files.
    """
    import transformers.modeling_utils as module

    # The function is an attribute of a module: one save at a time may replace it.
    with _replacing:
        original = getattr(module, SAVE_FUNCTION, None)
        if original is None:
            yield
            return
        setattr(module, SAVE_FUNCTION, save_file)
        try:
            yield
        finally:
            setattr(module, SAVE_FUNCTION, original)


class _Writer:
    """Writer of one file: bytes go to the disk and into digests, in order."""

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self._whole = hashlib.sha256()
        self._size = self._unsynced = 0
        self._pending: deque[tuple[Tensor | None, list[Future[None]]]] = deque()
        self._synced: list[Future[None]] = []
        self._buffers: list[Tensor] = []
        self._stream: torch.cuda.Stream | None = None
        self._threads = ExitStack()

    def __enter__(self) -> _Writer:
        def thread(name: str) -> ThreadPoolExecutor:
            # One thread per pool keeps the pieces in order.
            return self._threads.enter_context(ThreadPoolExecutor(1, thread_name_prefix=name))

        self._writing, self._syncing = thread("save-write"), thread("save-sync")
        self._hashing, self._digesting = thread("save-hash"), thread("save-digest")
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.close()

    def add(self, data: memoryview, update: Update | None = None) -> None:
        """Append bytes, which must not change before `finish`, and pass them to `update`."""
        self._wait(PIECES - 1)
        self._send(data, update)

    def add_tensor(self, tensor: Tensor, dtype: torch.dtype, update: Update) -> None:
        """Append the values of a tensor as `dtype` and pass their bytes to `update` in order."""
        # A column's reshape(-1) is a view with gaps.
        flat = tensor.detach().reshape(-1).contiguous()
        for piece in flat.split(PIECE // dtype.itemsize):
            if piece.is_cuda:
                self._add_copy(piece, dtype, update)
            else:
                self.add(_bytes(piece.to(dtype)), update)

    def finish(self) -> FileRecord:
        """Wait until everything is on disk; return the record of the file. Raises what failed."""
        self._wait(0)
        for future in self._synced:
            future.result()
        os.fsync(self._file.fileno())
        return FileRecord(self._size, self._whole.hexdigest())

    def _add_copy(self, piece: Tensor, dtype: torch.dtype, update: Update) -> None:
        """Append a piece of a tensor on a device, through a pinned buffer."""
        self._wait(PIECES - 1)
        if not self._buffers:
            self._buffers.append(torch.empty(PIECE, dtype=torch.uint8, pin_memory=True))
        buffer = self._buffers.pop()
        if self._stream is None:
            self._stream = torch.cuda.Stream(piece.device)
            self._stream.wait_stream(torch.cuda.current_stream(piece.device))
        with torch.cuda.stream(self._stream):
            pinned = buffer.view(dtype)[: piece.numel()]
            pinned.copy_(piece, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        self._send(_bytes(pinned), update, buffer, copied)

    def _send(
        self,
        data: memoryview,
        update: Update | None,
        buffer: Tensor | None = None,
        copied: torch.cuda.Event | None = None,
    ) -> None:
        """Queue bytes for the threads, which wait for the event `copied` first."""

        def run(take: Update) -> None:
            if copied is not None:
                copied.synchronize()
            take(data)

        # Writing and both digests read the same bytes at the same time, each in its own thread.
        futures = [
            self._writing.submit(run, self._write),
            self._hashing.submit(run, self._whole.update),
        ]
        if update is not None:
            futures.append(self._digesting.submit(run, update))
        self._pending.append((buffer, futures))
        self._size += len(data)

    def _wait(self, most: int) -> None:
        """Wait until at most `most` pieces are in flight. Raises what failed."""
        while len(self._pending) > most:
            buffer, futures = self._pending.popleft()
            for future in futures:
                future.result()
            if buffer is not None:
                self._buffers.append(buffer)

    def _write(self, data: memoryview) -> None:
        left = data
        while left:
            left = left[self._file.write(left) :]
        self._unsynced += len(data)
        if self._unsynced >= SYNC_BYTES:
            self._unsynced = 0
            self._synced.append(self._syncing.submit(os.fsync, self._file.fileno()))


def _header(
    items: Sequence[tuple[str, Tensor, torch.dtype]], metadata: Mapping[str, str] | None
) -> bytes:
    """Return the header of a safetensors file with these tensors in this order."""
    fields: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, tensor, dtype in items:
        end = at + tensor.numel() * dtype.itemsize
        fields[name] = {
            "dtype": type_name(name, dtype),
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def saved_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a tensor is saved: `dtype` for floats, its own for others."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def type_name(name: str, dtype: torch.dtype) -> str:
    """Return safetensors' name of the dtype. Raises CheckpointError for one it has not."""
    if dtype not in NAMES:
        raise CheckpointError(f"tensor {name!r} has dtype {dtype}, which no worker serves")
    return NAMES[dtype]


def _bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor. They keep the tensor alive."""
    data: memoryview = tensor.view(torch.uint8).numpy().data
    return data
