"""Small checkpoints in plain numpy, and ways to rewrite one header at a time."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.checkpoint import safetensors_file as tensor_file

Header = dict[str, Any]
ROWS, WIDTH = 16, 8
NAMES = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.norm.weight",
)
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = [(ROWS, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH,)]
    return {
        name: rng.standard_normal(shape).astype("<f4")
        for name, shape in zip(NAMES, shapes, strict=True)
    }


def write(directory: Path, arrays: dict[str, np.ndarray] | None = None) -> Path:
    """A checkpoint of a single file, with a config that ties the head."""
    directory.mkdir(parents=True, exist_ok=True)
    tensor_file.write(directory / "model.safetensors", tensors() if arrays is None else arrays)
    configure(directory, tied=True)
    return directory


def write_sharded(directory: Path, arrays: dict[str, np.ndarray] | None = None) -> Path:
    """The same in two files and an index."""
    directory.mkdir(parents=True, exist_ok=True)
    arrays = tensors() if arrays is None else arrays
    names = list(arrays)
    places = {name: FIRST if at < len(names) // 2 else SECOND for at, name in enumerate(names)}
    for file in (FIRST, SECOND):
        mine = {name: array for name, array in arrays.items() if places[name] == file}
        tensor_file.write(directory / file, mine)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    configure(directory, tied=True)
    return directory


def configure(directory: Path, *, tied: bool) -> None:
    (directory / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))


def parts(path: Path) -> tuple[bytes, bytes]:
    """Header and data of a safetensors file."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return raw[8 : 8 + length], raw[8 + length :]


def join(path: Path, header: bytes, data: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def edit(path: Path, change: Callable[[Header], Header | None]) -> None:
    """Rewrites the header; `change` works in place, or returns another."""
    header, data = parts(path)
    raw = json.loads(header)
    join(path, json.dumps(change(raw) or raw).encode(), data)
