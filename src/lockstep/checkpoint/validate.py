"""Validation of checkpoints: inside an allowed root, complete, of the served model's shape.

These functions read files and may block: asynchronous callers use a thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from lockstep.checkpoint.delta.chain import check_roots
from lockstep.checkpoint.delta.delta_reader import DeltaReader
from lockstep.checkpoint.digest import combined, differing
from lockstep.checkpoint.files import read_object
from lockstep.checkpoint.manifest import (
    INDEX,
    MANIFEST,
    PROBE,
    Manifest,
    check_stable,
    mark_stable,
    write_manifest,
)
from lockstep.checkpoint.open import open_checkpoint
from lockstep.checkpoint.probe import Probe
from lockstep.checkpoint.reader import CheckpointReader, TensorShape
from lockstep.checkpoint.sources import check_links, resolve
from lockstep.checkpoint.tensor_names import EMBEDDING, HEAD, check_names, tied_head_differs
from lockstep.checkpoint.tensor_scan import digests
from lockstep.tokens.errors import CheckpointError
from lockstep.tokens.operation import DeltaSummary

__all__ = [
    "Checkpoint",
    "ModelSignature",
    "TensorShape",
    "mark_stable",
    "resolve",
    "write_manifest",
]

CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """Shapes and dtypes of a model's tensors, by name. A tied head is optional."""

    tensors: Mapping[str, TensorShape]
    tied: bool

    @classmethod
    def of(cls, path: Path) -> ModelSignature:
        """Build the signature from the headers of a checkpoint. Raises CheckpointError if
        incomplete.
        """
        return cls._of(open_checkpoint(path))

    @classmethod
    def _of(cls, reader: CheckpointReader) -> ModelSignature:
        path, tensors = reader.directory, reader.tensors
        if not tensors:
            raise CheckpointError(f"{path} holds no tensors")
        tied = HEAD not in tensors
        if (path / CONFIG).exists():
            tied = read_object(path / CONFIG).get("tie_word_embeddings", tied) is True
        return cls(MappingProxyType(tensors), tied)

    def check(self, saved: ModelSignature, path: Path) -> None:
        """Raise CheckpointError naming the tensors of `saved` that are unknown, missing or
        different.
        """
        check_names(saved.tensors, self.tensors, str(path), tied=self.tied)
        model = dict(self.tensors)
        if self.tied and EMBEDDING in model:
            model[HEAD] = model[EMBEDDING]
        for name in model.keys() & saved.tensors.keys():
            has, expected = saved.tensors[name], model[name]
            if (has.shape, has.kind) != (expected.shape, expected.kind):
                raise CheckpointError(f"tensor {name!r} of {path} is {has}, expected {expected}")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A validated checkpoint.

    `digest` identifies the weights by contents, however they are split into files; a worker that
    loaded them reports the same one. `tensors` are the digests it is computed from. `warnings`
    name tensors that load but are probably wrong; the proof decides whether they are served.
    `delta` says what it changes, if it is one.
    """

    path: Path
    signature: ModelSignature
    nbytes: int
    digest: str
    tensors: Mapping[str, str]
    probe: Probe | None
    warnings: tuple[str, ...] = ()
    delta: DeltaSummary | None = None

    @classmethod
    def validate(
        cls,
        path: Path,
        like: ModelSignature | None = None,
        *,
        roots: Sequence[Path] = (),
        verify_hashes: bool = False,
    ) -> Checkpoint:
        """Read all of it. Raises CheckpointError unless every worker could load it.

        Its files must be inside `path` or `roots` after resolving symlinks (else Forbidden).
        `like` is the signature of the served model.
        """
        try:
            return cls._validate(path, like, roots, verify_hashes)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None

    @classmethod
    def _validate(
        cls, path: Path, like: ModelSignature | None, roots: Sequence[Path], verify_hashes: bool
    ) -> Checkpoint:
        before = _snapshot(path)
        manifest = Manifest.read(path)
        check_stable(path, manifest)
        check_links(path, before, roots)
        reader = open_checkpoint(path)
        delta = None
        if isinstance(reader, DeltaReader):
            check_roots(reader.chain, roots or (path.parent,))
            delta = reader.link.summary
        if manifest is not None:
            used = {file.name for file in reader.files} | ({INDEX, CONFIG, PROBE} & before.keys())
            manifest.check(path, sorted(used), hashes=verify_hashes)
        signature = ModelSignature._of(reader)
        if like is not None:
            like.check(signature, path)
        probe = Probe.beside(path)
        _check_vocabulary(probe, signature, path)
        odd: list[str] = []
        contents = digests(reader, odd)
        if manifest is not None and manifest.tensors and contents != manifest.tensors:
            raise CheckpointError(
                f"{path} does not hold what was written: its contents differ from "
                f"{MANIFEST} in {differing(manifest.tensors, contents)}; write it anew"
            )
        _check_head(like or signature, signature, contents, path)
        if _snapshot(path) != before:
            raise CheckpointError(f"{path} changed while it was read: write it once, then update")
        return cls(
            path=path,
            signature=signature,
            nbytes=sum(tensor.nbytes for tensor in reader.tensors.values()),
            digest=combined(contents),
            tensors=MappingProxyType(contents),
            probe=probe,
            warnings=tuple(odd),
            delta=delta,
        )


def _snapshot(path: Path) -> dict[str, tuple[int, int, int]]:
    """Return a value that changes when the directory is written to."""
    entries = {}
    for item in sorted(path.iterdir()):
        try:
            now = item.stat()
        except FileNotFoundError:
            raise CheckpointError(f"{item} leads nowhere, or was just removed") from None
        entries[item.name] = (now.st_ino, now.st_size, now.st_mtime_ns)
    return entries


def _check_vocabulary(probe: Probe | None, signature: ModelSignature, path: Path) -> None:
    embedding = signature.tensors.get(EMBEDDING)
    if probe is None or embedding is None or len(embedding.shape) != 2:
        return
    if (largest := max(map(max, probe.sequences))) >= embedding.shape[0]:
        raise CheckpointError(
            f"{path / PROBE} has token id {largest}, but the model knows {embedding.shape[0]}"
        )


def _check_head(
    served: ModelSignature, saved: ModelSignature, contents: Mapping[str, str], path: Path
) -> None:
    """Raise CheckpointError for a tied head that differs from the embedding."""
    head, embedding = saved.tensors.get(HEAD), saved.tensors.get(EMBEDDING)
    if not served.tied or head is None or head != embedding:
        return
    if contents[HEAD] != contents[EMBEDDING]:
        raise tied_head_differs(str(path))
