"""One file of a run that a third party can audit: its chain, the files it names, and its model.

A pack is an uncompressed tar archive. It holds data only: JSON, safetensors and tokenizer files.
Pickles and programs are refused, both when a pack is made and when it is opened.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from lockstep.chain.records import CHAIN, FILES, Chain
from lockstep.checkpoint.manifest import sha256_of
from lockstep.models import model_directory
from lockstep.replay.verification import chain_problems
from lockstep.tokens.errors import BadRequest, Conflict

PACK, MODEL = "pack.json", "model"
FORMAT = "lockstep-pack-1"
DATA = (".safetensors", ".json", ".txt", ".jinja", ".model", ".tiktoken")
"""Suffixes of model files that hold data and no code."""
CODE_KEYS = ("auto_map", "custom_pipelines", "attn_implementation")
"""Parts of keys of model files by which transformers loads code from elsewhere."""
_NAME = re.compile(r"[\w][\w.+-]*")


@dataclass(frozen=True, slots=True)
class Pack:
    """A written pack: its file, the digest of the run's last record, and what was left out."""

    path: Path
    head: str
    steps: int
    files: int
    left_out: tuple[str, ...]


def write_pack(run: str | Path, path: Path, *, with_model: bool = True) -> Pack:
    """Write the chain of a run, the files it names and its model to one file.

    The model is read from where the run's configuration says. Without it, the file is small, and an
    auditor has to name a directory with the same model. Raises BadRequest for a chain that does not
    hold, for a model that is not the recorded one, and for a file that exists.
    """
    chain = Chain.read(run)
    if problems := chain_problems(chain):
        raise BadRequest(f"the run cannot be packed: {problems[0]}", param="run")
    model, left_out = _model_files(chain) if with_model else ({}, tuple(chain.start["model"]))
    about = {
        "format": FORMAT,
        "run": chain.directory.resolve().name,
        "head": chain.head,
        "left_out": list(left_out),
    }
    files = {
        CHAIN: chain.directory / CHAIN,
        **{f"{FILES}/{name}": chain.directory / FILES / name for name in chain.files},
        **{f"{MODEL}/{name}": source for name, source in model.items()},
    }
    try:
        with tarfile.open(path, "x:") as archive:
            _add(archive, PACK, json.dumps(about, indent=1).encode())
            for name, source in files.items():
                archive.add(source.resolve(), name, recursive=False, filter=_plain)
    except FileExistsError:
        raise BadRequest(f"{path} exists already: choose another file", param="out") from None
    return Pack(path, chain.head, len(chain.steps), len(files) + 1, tuple(left_out))


def unpack(path: Path, directory: Path) -> None:
    """Extract a pack. Raises BadRequest for a file that is no pack, and for one with unsafe files.

    Only the files that `write_pack` writes are accepted: no links, no paths to other places, no
    pickles, no programs. The file does not decide anything else: what the chain says is checked.
    """
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                _check_member(member, path)
                archive.extract(member, directory, filter="data")
    except tarfile.TarError as error:
        raise BadRequest(f"{path} is not a pack of a run: {error}", param="run") from None
    read_about(directory)
    check_model(directory / MODEL)


def read_about(directory: Path) -> dict[str, Any]:
    """Return what an extracted pack says about itself. Raises BadRequest if it is no pack."""
    try:
        about: dict[str, Any] = json.loads((directory / PACK).read_bytes())
    except (OSError, ValueError) as error:
        raise BadRequest(f"{directory} is not a pack of a run: {error}", param="run") from None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise BadRequest(f"{directory / PACK} does not have format {FORMAT!r}", param="run")
    return about


def check_model(directory: Path) -> None:
    """Raise BadRequest for model files that are not plain data, or that name code to load."""
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        if path.suffix not in DATA:
            raise BadRequest(
                f"{path.name} of the packed model may hold code: expected {', '.join(DATA)}",
                param="run",
            )
        if path.suffix == ".json" and (key := _code_key(path)):
            raise BadRequest(
                f"{path.name} of the packed model has {key!r}, by which code would be loaded: "
                "inspect the model, and name a directory of it with --model",
                param="run",
            )


def _code_key(path: Path) -> str | None:
    try:
        keys = _keys(json.loads(path.read_bytes()))
        return next((key for key in keys if any(own in key for own in CODE_KEYS)), None)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{path.name} of the packed model is broken: {error}") from None


def _keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            if key != "vocab":  # a tokenizer's vocabulary: its keys are tokens
                yield from _keys(item)
    elif isinstance(value, list):
        for item in value:
            yield from _keys(item)


def _model_files(chain: Chain) -> tuple[dict[str, Path], tuple[str, ...]]:
    """Return the recorded files of the model that are data, and the names of all others."""
    directory = model_directory(chain.start["config"]["model"])
    files: dict[str, Path] = {}
    left_out = []
    for name, digest in chain.start["model"].items():
        path = directory / name
        if path.suffix not in DATA:
            left_out.append(name)
        elif not path.is_file() or sha256_of(path) != digest:
            raise Conflict(
                f"{path} is missing, or not the file that the run started from: restore it, or "
                "pack without the model (--without-model)",
                param="model",
            )
        else:
            files[name] = path
    return files, tuple(left_out)


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Leave out the owner and the time of a file, so that equal runs have equal packs."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime, member.mode = 0, 0o644
    return member


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = _plain(tarfile.TarInfo(name))
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


def _check_member(member: tarfile.TarInfo, path: Path) -> None:
    parts = PurePosixPath(member.name).parts
    expected = (
        member.name in (PACK, CHAIN)
        or (len(parts) == 2 and parts[0] == FILES and member.name.endswith(".json.gz"))
        or (len(parts) == 2 and parts[0] == MODEL and member.name.endswith(DATA))
    )
    if not (member.isreg() and expected and all(_NAME.fullmatch(part) for part in parts)):
        raise BadRequest(
            f"{path} holds {member.name!r}, which is not a file of a packed run: it was not made "
            "by `lockstep pack`, or was altered",
            param="run",
        )
