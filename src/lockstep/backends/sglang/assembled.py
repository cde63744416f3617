"""Checkpoints as SGLang can load them: whole safetensors files in one directory."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from lockstep.checkpoint.delta.convert import write_full
from lockstep.checkpoint.open import open_checkpoint
from lockstep.checkpoint.whole_reader import WholeReader
from lockstep.tokens.errors import UnsupportedField

LOCAL = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class AssembledCheckpoint:
    """A directory to load. `folder` is the temporary one that it is in, if it was assembled."""

    path: Path
    folder: Path | None = None

    @classmethod
    def of(cls, directory: Path, url: str) -> AssembledCheckpoint:
        """Return a checkpoint for the server at `url`; one in slices or a delta is assembled.

        A checkpoint is assembled where this process runs, so the server must run there too. Raises
        UnsupportedField for another host, and CheckpointError for a broken checkpoint.
        """
        if isinstance(open_checkpoint(directory), WholeReader):
            return cls(directory)
        if urlsplit(url).hostname not in LOCAL:
            raise UnsupportedField(
                f"{directory} is in slices or a delta, and SGLang at {url} can only load whole "
                "checkpoints: write one to a directory that its host can read with `lockstep "
                "checkpoints apply`, or run the gateway on the server's host",
                param="weight_dir",
            )
        folder = Path(tempfile.mkdtemp(prefix="lockstep-sglang-"))
        path = folder / directory.name
        try:
            write_full(directory, path)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return cls(path, folder)

    def remove(self) -> None:
        """Delete what was assembled."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
