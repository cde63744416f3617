"""Checkpoints a fleet may load: inside an allowed root, complete, of the served model's shape.

Everything here reads files and takes its time: asynchronous callers use a thread.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from lockstep.checkpoint.digest import DERIVED, combined, differing
from lockstep.checkpoint.files import read_object
from lockstep.checkpoint.manifest import (
    INDEX,
    MANIFEST,
    PROBE,
    WEIGHTS,
    Manifest,
    check_stable,
    mark_stable,
    write_manifest,
)
from lockstep.checkpoint.probe import Probe
from lockstep.checkpoint.safetensors_file import TensorFile
from lockstep.checkpoint.tensor_scan import digests
from lockstep.tokens.errors import BadRequest, CheckpointError, Forbidden

__all__ = [
    "Checkpoint",
    "ModelSignature",
    "TensorShape",
    "mark_stable",
    "resolve",
    "write_manifest",
]

CONFIG = "config.json"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


def resolve(weight_dir: str, roots: Sequence[Path]) -> Path:
    """The directory that `weight_dir` means, without symlinks in its path.

    Raises BadRequest for a path that cannot be meant, Forbidden for one outside `roots` (wherever
    its symlinks lead), CheckpointError for one that is no directory.
    """
    param = "weight_dir"
    if not weight_dir or not _spellable(weight_dir):
        raise BadRequest(
            f"weight_dir is {weight_dir!r}: expected the absolute path of a directory", param=param
        )
    if not os.path.isabs(weight_dir):
        raise BadRequest(
            f"weight_dir is {weight_dir!r}, a relative path: give an absolute one, as the fleet "
            "runs in another directory than you",
            param=param,
        )
    path = Path(os.path.realpath(weight_dir))
    if not _inside(path, roots):
        led = "" if str(path) == weight_dir else f", which leads to {path},"
        raise Forbidden(
            f"weight_dir is {weight_dir!r}{led} outside the allowed roots "
            f"({', '.join(map(str, roots)) or 'there are none'}): move it or add a checkpoint root",
            param=param,
        )
    try:
        if not stat.S_ISDIR(path.stat().st_mode):
            raise NotADirectoryError("it is not a directory")
    except OSError as error:
        said = error.strerror or error
        raise CheckpointError(f"weight_dir is {weight_dir!r}: {said}", param=param) from None
    return path


@dataclass(frozen=True, slots=True)
class TensorShape:
    """Shape and type of one tensor."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def kind(self) -> str:
        """Types of one kind stand for each other: a worker serves in a precision of its own."""
        return "float" if self.dtype in FLOATS else self.dtype

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """What a model's tensors look like, by name. A tied head may be there or not."""

    tensors: Mapping[str, TensorShape]
    tied: bool

    @classmethod
    def of(cls, path: Path) -> ModelSignature:
        """From the headers of a checkpoint. Raises CheckpointError when it is not complete."""
        return cls._of(path, _files(path))

    @classmethod
    def _of(cls, path: Path, files: Sequence[TensorFile]) -> ModelSignature:
        tensors: dict[str, TensorShape] = {}
        for file in files:
            for entry in file.entries:
                if entry.name in tensors:
                    raise CheckpointError(f"tensor {entry.name!r} is in {path} twice")
                tensors[entry.name] = TensorShape(entry.shape, entry.dtype)
        if not tensors:
            raise CheckpointError(f"{path} holds no tensors")
        tied = HEAD not in tensors
        if (path / CONFIG).exists():
            tied = read_object(path / CONFIG).get("tie_word_embeddings", tied) is True
        return cls(MappingProxyType(tensors), tied)

    def check(self, found: ModelSignature, path: Path) -> None:
        """Raises CheckpointError that names the tensors of `found` that this model does not have,
        lacks, or has otherwise."""
        wanted = dict(self.tensors)
        if self.tied:
            wanted.pop(HEAD, None)
            if HEAD in found.tensors and EMBEDDING in wanted:
                wanted[HEAD] = wanted[EMBEDDING]
        missing = sorted(n for n in wanted.keys() - found.tensors.keys() if not _derived(n))
        if missing:
            raise CheckpointError(f"{path} lacks {_some(missing)} of the served model")
        extra = sorted(n for n in found.tensors.keys() - wanted.keys() if not _derived(n))
        if extra:
            raise CheckpointError(f"{path} has {_some(extra)}, which the served model has not")
        for name in wanted.keys() & found.tensors.keys():
            has, want = found.tensors[name], wanted[name]
            if (has.shape, has.kind) != (want.shape, want.kind):
                raise CheckpointError(f"tensor {name!r} of {path} is {has}, expected {want}")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was looked at and found sound.

    `digest` identifies the weights: the same for the same contents, however they are split up, and
    the same that a worker reports which read them. `tensors` are the digests it is made of.
    """

    path: Path
    signature: ModelSignature
    nbytes: int
    digest: str
    tensors: Mapping[str, str]
    probe: Probe | None

    @classmethod
    def validate(
        cls,
        path: Path,
        like: ModelSignature | None = None,
        *,
        roots: Sequence[Path] = (),
        verify_hashes: bool = False,
    ) -> Checkpoint:
        """Reads all of it, and raises CheckpointError unless every worker could load it.

        Its files must lie in `path` or in `roots`, also where they are symlinks (else Forbidden).
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
        for name in before:
            if (path / name).is_symlink() and not _inside((path / name).resolve(), (path, *roots)):
                raise Forbidden(f"{path / name} is a symlink out of the allowed roots")
        files = _files(path)
        if manifest is not None:
            used = {file.path.name for file in files} | ({INDEX, CONFIG, PROBE} & before.keys())
            manifest.check(path, sorted(used), hashes=verify_hashes)
        signature = ModelSignature._of(path, files)
        if like is not None:
            like.check(signature, path)
        probe = Probe.beside(path)
        _check_vocabulary(probe, signature, path)
        contents: dict[str, str] = {}
        for file in files:
            contents |= digests(file)
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
            nbytes=sum(entry.end - entry.start for file in files for entry in file.entries),
            digest=combined(contents),
            tensors=MappingProxyType(contents),
            probe=probe,
        )


def _files(path: Path) -> list[TensorFile]:
    """The headers of all weight files. Raises CheckpointError unless they are all there."""
    index = path / INDEX
    if not (index.exists() or index.is_symlink()):
        shards = sorted(path.glob("model-*.safetensors"))
        if shards:
            raise CheckpointError(f"{path} has {shards[0].name} but no {INDEX}: not complete")
        return [TensorFile.read(path / WEIGHTS)]
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{index} has no weight_map")
    for name in places.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index} names {name!r}, which is not a file beside it")
    names = sorted(set(places.values()))
    if WEIGHTS not in names and (path / WEIGHTS).exists():
        raise CheckpointError(
            f"{path} has both {WEIGHTS} and an {INDEX} without it: remove one, as loaders do not "
            "agree on which to take"
        )
    files = [TensorFile.read(path / name) for name in names]
    found = {entry.name: file.path.name for file in files for entry in file.entries}
    for tensor in sorted(found.keys() | places.keys()):
        if found.get(tensor) != places.get(tensor):
            raise CheckpointError(
                f"tensor {tensor!r} is in {found.get(tensor, 'no file')}, but {index} places it in "
                f"{places.get(tensor, 'none')}"
            )
    return files


def _snapshot(path: Path) -> dict[str, tuple[int, int, int]]:
    """What changes when somebody writes into the directory."""
    found = {}
    for item in sorted(path.iterdir()):
        try:
            now = item.stat()
        except FileNotFoundError:
            raise CheckpointError(f"{item} leads nowhere, or was just removed") from None
        found[item.name] = (now.st_ino, now.st_size, now.st_mtime_ns)
    return found


def _spellable(path: str) -> bool:
    """Whether a file could have that name at all."""
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False


def _inside(path: Path, roots: Sequence[Path]) -> bool:
    return any(path.is_relative_to(os.path.realpath(root)) for root in roots)


def _check_vocabulary(probe: Probe | None, signature: ModelSignature, path: Path) -> None:
    embedding = signature.tensors.get(EMBEDDING)
    if probe is None or embedding is None or len(embedding.shape) != 2:
        return
    if (largest := max(map(max, probe.sequences))) >= embedding.shape[0]:
        raise CheckpointError(
            f"{path / PROBE} has token id {largest}, but the model knows {embedding.shape[0]}"
        )


def _check_head(
    served: ModelSignature, found: ModelSignature, contents: Mapping[str, str], path: Path
) -> None:
    """A tied head that is there must be the embedding: else half of a pair was updated."""
    head, embedding = found.tensors.get(HEAD), found.tensors.get(EMBEDDING)
    if not served.tied or head is None or head != embedding:
        return
    if contents[HEAD] != contents[EMBEDDING]:
        raise CheckpointError(
            f"{HEAD} of {path} differs from {EMBEDDING}, but the served model ties them: leave it "
            "out, or serve a model with tie_word_embeddings false"
        )


def _derived(name: str) -> bool:
    return name.endswith(DERIVED)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"tensor{'s' * (len(names) > 1)} {', '.join(map(repr, names[:3]))}{more}"
