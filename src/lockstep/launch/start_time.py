"""How long a server may take to load its model, by the size of the model's files."""

from __future__ import annotations

from lockstep.models import model_directory

BASE_SECONDS = 300.0
"""For starting processes, compiling kernels and capturing graphs."""
BYTES_PER_SECOND = 50e6
"""A slow network disk. Several servers of a machine may read at once."""
DOWNLOAD_SECONDS = 3600.0
"""For a name on the hub, whose size is not known."""


def start_seconds(model: str) -> float:
    """Return the seconds after which a server of `model` that is not ready has failed."""
    directory = model_directory(model)
    if not directory.is_dir():
        return DOWNLOAD_SECONDS
    weights = [
        *directory.glob("*.safetensors"),
        *directory.glob("*.bin"),
        *directory.glob("*.gguf"),
    ]
    size = sum(path.stat().st_size for path in weights)
    return BASE_SECONDS + size / BYTES_PER_SECOND
