"""The identity of the model that a fleet serves, from its files or from its name."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from lockstep.models import bundled
from lockstep.tokens.errors import LockstepError, Unavailable

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
HEAD_BYTES = 64 << 10
BLOCKS = 16
BLOCK_BYTES = 4 << 10
"""Size of the blocks read from each weight file: enough to tell a fine-tuned model from its base,
and a few seconds for the largest models.
"""
log = logging.getLogger(__name__)
POLL_SECONDS = 0.2
REQUEST_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The identity of a model. `label` is stored with the state and compared; `directory_name`
    names the state directory.
    """

    label: str
    directory_name: str

    @classmethod
    def of_files(cls, model: str) -> ModelIdentity:
        """Return the identity of a bundled model or a model directory.

        It is made of the configuration and samples of the weights, so that a copy has the same
        identity. Any other model is identified by its name.
        """
        path = bundled(model) or Path(model)
        digest = blake2b(digest_size=8)
        if path.is_dir():
            name = path.resolve().name
            for file in sorted(path.iterdir()):
                if file.name == "config.json" or file.suffix in WEIGHTS:
                    _add_file(digest, file)
        else:
            name = model
            digest.update(model.encode())
        hexdigest = digest.hexdigest()
        return cls(f"{name} ({hexdigest})", f"{_plain(name)}-{hexdigest}")

    @classmethod
    def of_fleet(cls, model: str, urls: Sequence[str]) -> ModelIdentity:
        """Return the identity of a model that remote workers serve: its name, with one state
        directory for every set of workers.
        """
        digest = blake2b("\n".join([model, *sorted(urls)]).encode(), digest_size=8)
        return cls(model, f"{_plain(model)}-{digest.hexdigest()}")


async def served_model(urls: Sequence[str], seconds: float, options: Mapping[str, Any]) -> str:
    """Return the name of the model that the first server to respond serves.

    `options` are those of `open_transport`. Raises Unavailable when none responds in time.
    """
    from lockstep.backends.registry import open_transport

    deadline = asyncio.get_running_loop().time() + seconds
    warned = False
    while True:
        for url in urls:
            try:
                transport = await open_transport(url, retries=0, timeout=REQUEST_SECONDS, **options)
                try:
                    cards = await transport.models()
                finally:
                    await transport.close()
            except LockstepError as error:
                reason = error.message
                continue
            if bases := [card.id for card in cards if card.parent is None]:
                return bases[0]
            reason = f"{url} serves no model yet"
        if asyncio.get_running_loop().time() >= deadline:
            raise Unavailable(f"0 of {len(urls)} workers serve after {seconds:g} s: {reason}")
        if not warned:
            log.warning("waiting up to %g s for a worker: %s", seconds, reason)
        warned = True
        await asyncio.sleep(POLL_SECONDS)


def _add_file(digest: Any, path: Path) -> None:
    size = path.stat().st_size
    digest.update(f"{path.name}\0{size}\0".encode())
    with path.open("rb") as file:
        digest.update(file.read(HEAD_BYTES))
        for index in range(BLOCKS):
            file.seek(size * index // BLOCKS)
            digest.update(file.read(BLOCK_BYTES))
        file.seek(max(0, size - BLOCK_BYTES))
        digest.update(file.read(BLOCK_BYTES))


def _plain(name: str) -> str:
    """Return the name as one path component that is valid on any file system."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[-80:] or "model"
