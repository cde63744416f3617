"""Records of a run, one JSON object per line of chain.jsonl, and the files they vouch for.

chain.jsonl             one record per line; `previous` is the SHA-256 of the line before
chain/step-N.json.gz    what a step learnt from: tasks, rollouts, samples, rewards, draws
chain/tensors-N.json.gz digests of its gradients, optimizer state and weights, by tensor

The first record (kind "start") describes the run: configuration, code, model, arithmetic. Every
step has a record (kind "step"), and so have the resumption and the end of a run ("resume", "end").
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.tokens.errors import BadRequest, NotFound

CHAIN, FILES = "chain.jsonl", "chain"
FORMAT = "lockstep-chain-1"
SLACK = 1 << 16
"""Bytes that are read of an altered file beyond its recorded size."""
Record = dict[str, Any]
Sign = Callable[[bytes], str]


def canonical(value: Any) -> bytes:
    """Return the one JSON text of a value: sorted keys, no spaces. NaN and infinities are strings.

    >>> canonical({"b": 1, "a": [0.5]})
    b'{"a":[0.5],"b":1}'
    """
    try:
        return _dump(value)
    except ValueError:  # JSON has no such numbers, and they are rare
        return _dump(_finite(value))


def _dump(value: Any) -> bytes:
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False
    ).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True, slots=True)
class Link:
    """One record as written. `digest` is that of its line, which the next record repeats."""

    record: Record
    digest: str

    @classmethod
    def of(cls, line: bytes) -> Link:
        record: Record = json.loads(line)
        return cls(record, sha256(line))

    @property
    def kind(self) -> str:
        return str(self.record["kind"])

    @property
    def step(self) -> int:
        """The step that the record is about; that of its weights for start, resume and end."""
        return int(self.record["step"])


@dataclass(frozen=True, slots=True)
class Chain:
    """The records of a run directory. `breaks` says in sentences where the chain does not hold."""

    directory: Path
    links: tuple[Link, ...]
    breaks: tuple[str, ...]

    @classmethod
    def read(cls, directory: str | Path) -> Chain:
        """Read the chain of a run. An incomplete last line, left by a killed trainer, is ignored.

        Raises NotFound without a chain, and BadRequest for one of another format.
        """
        directory = Path(directory)
        path = directory / CHAIN
        if not path.is_file():
            raise NotFound(
                f"{directory} has no {CHAIN}: expected the directory of a run of `lockstep train`, "
                "of a version that records a chain",
                param="run",
            )
        links: list[Link] = []
        breaks: list[str] = []
        for number, line in enumerate(_whole_lines(path), start=1):
            try:
                link = Link.of(line)
                _ = link.kind, link.step
            except (ValueError, KeyError, TypeError) as error:
                breaks.append(f"line {number} of {CHAIN} is not a record: {error}")
                break
            before = links[-1].digest if links else ""
            if link.record.get("previous") != before:
                breaks.append(
                    f"line {number} of {CHAIN} (step {link.step}) does not follow line "
                    f"{number - 1}: its `previous` is {str(link.record.get('previous'))[:12]!r}, "
                    f"expected {before[:12]!r}"
                )
            links.append(link)
        if not links or links[0].record.get("format") != FORMAT:
            raise BadRequest(
                f"{path} does not start with a record of format {FORMAT!r}", param="run"
            )
        return cls(directory, tuple(links), tuple(breaks))

    @property
    def start(self) -> Record:
        """The first record: configuration, code, model and arithmetic."""
        return self.links[0].record

    @property
    def head(self) -> str:
        """Digest of the last record, which stands for the whole run."""
        return self.links[-1].digest

    @property
    def steps(self) -> dict[int, Record]:
        """The records of the steps, by step."""
        return {link.step: link.record for link in self.links if link.kind == "step"}

    @property
    def files(self) -> dict[str, Record]:
        """The files that the records name, by file name."""
        named = [self.start.get("tensors")]
        for record in self.steps.values():
            named += [record.get("file"), (record.get("learning") or {}).get("tensors")]
        return {Path(file["name"]).name: file for file in named if file is not None}

    def contents(self, file: Mapping[str, Any]) -> Record:
        """Return a file that a record names. Raises BadRequest if it is missing or altered."""
        name, digest = file["name"], file["sha256"]
        data = self.file_bytes(file)
        if (actual := sha256(data)) != digest:
            raise BadRequest(
                f"{FILES}/{name} was altered: its SHA-256 is {actual[:12]}, but the chain says "
                f"{digest[:12]}",
                param="run",
            )
        contents: Record = json.loads(data)
        return contents

    def file_bytes(self, file: Mapping[str, Any]) -> bytes:
        """Return the bytes of a file that a record names, altered or not.

        Raises BadRequest if it cannot be read. A little more than the recorded size is read at
        most: a small file of a stranger may expand to terabytes.
        """
        path = self.directory / FILES / Path(file["name"]).name
        try:
            with gzip.open(path) as compressed:
                return compressed.read(int(file["bytes"]) + SLACK)
        except (OSError, EOFError, zlib.error) as error:
            raise BadRequest(f"{path} cannot be read: {error}", param="run") from None


class ChainWriter:
    """Appends records to the chain of a run directory."""

    def __init__(self, directory: Path, sign: Sign | None = None) -> None:
        self._directory = directory
        self._sign = sign
        self._head = ""
        if (path := directory / CHAIN).is_file():
            lines = list(_whole_lines(path))
            self._head = sha256(lines[-1]) if lines else ""

    @property
    def empty(self) -> bool:
        return not self._head

    def append(self, kind: str, step: int, **body: Any) -> Record:
        """Write one record and return it."""
        record: Record = {"kind": kind, "step": step, "previous": self._head, **body}
        if self._sign is not None:
            record["signature"] = self._sign(canonical(record))
        line = canonical(record)
        with open(self._directory / CHAIN, "ab") as file:
            file.write(line + b"\n")
        self._head = sha256(line)
        return record

    def write_file(self, name: str, data: bytes) -> dict[str, Any]:
        """Write a file of JSON beside the chain; return its name and digest, for the record."""
        folder = self._directory / FILES
        folder.mkdir(exist_ok=True)
        temporary = folder / f".{name}.tmp"
        # Level 1: samples shrink to a third in 1 ms per 100 kB, and higher levels gain little.
        temporary.write_bytes(gzip.compress(data, 1, mtime=0))
        os.replace(temporary, folder / name)
        return {"name": name, "sha256": sha256(data), "bytes": len(data)}

    def rewind(self, step: int) -> list[dict[str, Any]]:
        """Drop the records after `step`, and an incomplete last line.

        Returns kind, step and digest of the dropped records, for the record of the resume.
        """
        path = self._directory / CHAIN
        lines = list(_whole_lines(path)) if path.is_file() else []
        links = [Link.of(line) for line in lines]
        count = next((at for at, link in enumerate(links) if link.step > step), len(lines))
        temporary = path.with_name(f".{CHAIN}.tmp")
        temporary.write_bytes(b"".join(line + b"\n" for line in lines[:count]))
        os.replace(temporary, path)
        self._head = links[count - 1].digest if count else ""
        return [
            {"kind": link.kind, "step": link.step, "digest": link.digest} for link in links[count:]
        ]


def last_recorded_step(directory: Path) -> int | None:
    """Return the newest step with a record; None for a run without a chain."""
    path = directory / CHAIN
    if not path.is_file():
        return None
    return max((Link.of(line).step for line in _whole_lines(path)), default=None)


def _whole_lines(path: Path) -> Iterator[bytes]:
    data = path.read_bytes()
    return iter(data[: data.rfind(b"\n") + 1].split(b"\n")[:-1])
