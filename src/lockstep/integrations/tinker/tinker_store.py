"""The files of the server: sessions, training runs, their checkpoints, and samplers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import quote, unquote

import msgspec

from lockstep.storage.private_directory import close_to_others
from lockstep.tokens.errors import BadRequest, Conflict, Gone, NotFound

Kind = Literal["weights", "sampler_weights", "external_weights"]
KINDS: dict[Kind, str] = {
    "weights": "training", "sampler_weights": "sampler", "external_weights": "external",
}  # fmt: skip
EPHEMERAL = ".samplers"
SCHEME = "tinker://"
RECORD = "record.json"
T = TypeVar("T", bound=msgspec.Struct)


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The session of a client."""

    session_id: str
    created: datetime
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None
    finished: str | None = None


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A training run: one model of one training client."""

    model_id: str
    base_model: str
    rank: int
    created: datetime
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True
    user_metadata: dict[str, Any] | None = None


class CheckpointRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A saved state of a run after `steps` steps, for resuming or for a sampler."""

    model_id: str
    kind: Kind
    name: str
    created: datetime
    size: int = 0
    steps: int = 0
    public: bool = False
    expires: datetime | None = None
    user_metadata: dict[str, Any] | None = None

    @property
    def path(self) -> str:
        """The tinker:// path by which clients name it."""
        return f"{SCHEME}{self.model_id}/{self.kind}/{self.name}"

    @property
    def checkpoint_id(self) -> str:
        return f"{self.kind}/{self.name}"


class SamplerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A sampler: immutable weights, or the base model if `directory` is None."""

    sampler_id: str
    base_model: str
    created: datetime
    model_path: str | None = None
    directory: str | None = None


class TinkerStore:
    """The files of one tenant under `root`. Every file and checkpoint is written atomically."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("sessions", "runs", "samplers", EPHEMERAL):
            (root / name).mkdir(parents=True, exist_ok=True)
        # Other users of the machine reach no file below it, whatever the umask.
        close_to_others(root)

    # Sessions, runs, samplers

    def put_session(self, record: SessionRecord) -> None:
        _write(self.root / "sessions" / f"{file_name(record.session_id)}.json", record)

    def session(self, session_id: str) -> SessionRecord:
        """Return a session. Raises NotFound."""
        return _read(
            self.root / "sessions" / f"{file_name(session_id)}.json", SessionRecord,
            f"session {session_id!r}",
        )  # fmt: skip

    def live_session(self, session_id: str) -> SessionRecord:
        """Return a session. Raises Gone for an unknown one, which makes its client stop."""
        try:
            return self.session(session_id)
        except NotFound as error:
            raise Gone(error.message, param="session_id") from None

    def sessions(self) -> list[SessionRecord]:
        """Return all sessions, the newest first."""
        return _all(self.root.glob("sessions/*.json"), SessionRecord)

    def session_ids(self) -> list[str]:
        """Return the ids of all sessions, in any order."""
        files = self.root.glob("sessions/*.json")
        return [unquote(path.stem) for path in files if not path.name.startswith(".")]

    def run_directory(self, model_id: str) -> Path:
        """Return the directory of a training run, which need not exist."""
        return self.root / "runs" / file_name(model_id)

    def put_run(self, record: RunRecord) -> None:
        directory = self.run_directory(record.model_id)
        directory.mkdir(exist_ok=True)
        _write(directory / RECORD, record)

    def run(self, model_id: str) -> RunRecord:
        """Return a training run. Raises NotFound."""
        where = self.run_directory(model_id) / RECORD
        return _read(where, RunRecord, f"training run {model_id!r}")

    def runs(self) -> list[RunRecord]:
        """Return all training runs, the newest first."""
        return _all(self.root.glob(f"runs/*/{RECORD}"), RunRecord)

    def put_sampler(self, record: SamplerRecord) -> None:
        _write(self.root / "samplers" / f"{file_name(record.sampler_id)}.json", record)

    def sampler(self, sampler_id: str) -> SamplerRecord:
        """Return a sampler. Raises NotFound."""
        where = self.root / "samplers" / f"{file_name(sampler_id)}.json"
        return _read(where, SamplerRecord, f"sampling session {sampler_id!r}")

    def samplers(self) -> list[SamplerRecord]:
        """Return all samplers, the newest first."""
        return _all(self.root.glob("samplers/*.json"), SamplerRecord)

    # Checkpoints

    def checkpoint(self, path: str) -> tuple[CheckpointRecord, Path]:
        """Return the checkpoint of a path and its directory. Raises BadRequest or NotFound."""
        model_id, kind, name = parse(path)
        directory = self._directory(model_id, kind, name)
        record = _read(directory / RECORD, CheckpointRecord, f"checkpoint {path!r}")
        if record.expires is not None and record.expires < now():
            raise NotFound(f"checkpoint {path!r} expired at {record.expires}", param="path")
        return record, directory

    def checkpoints(self, model_id: str | None = None) -> list[CheckpointRecord]:
        """Return the checkpoints of one run, or of all, the newest first, without expired ones."""
        run = "*" if model_id is None else file_name(model_id)
        records = _all(self.root.glob(f"runs/{run}/*weights/*/{RECORD}"), CheckpointRecord)
        return [own for own in records if own.expires is None or own.expires > now()]

    def directory(self, record: CheckpointRecord) -> Path:
        """Return the directory of a checkpoint, which may not exist yet."""
        return self._directory(record.model_id, record.kind, record.name)

    @contextmanager
    def writing(self, record: CheckpointRecord, *, overwrite: bool = False) -> Iterator[Path]:
        """Yield a directory to write a checkpoint to; it becomes visible after the block.

        Raises Conflict when a checkpoint of that name exists, unless `overwrite` is true.
        """
        directory = self.directory(record)
        if (directory / RECORD).exists() and not overwrite:
            raise Conflict(
                f"checkpoint {record.path!r} exists: choose another name, or overwrite it",
                param="path",
            )
        partial = directory.with_name(f".{directory.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        size = sum(path.stat().st_size for path in partial.iterdir())
        _write(partial / RECORD, msgspec.structs.replace(record, size=size))
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)

    @contextmanager
    def writing_ephemeral(self, sampler_id: str) -> Iterator[Path]:
        """Yield a directory for the weights of an unnamed sampler; see `ephemeral`."""
        directory = self.ephemeral(sampler_id)
        partial = directory.with_name(f".{directory.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        yield partial
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)

    def ephemeral(self, sampler_id: str) -> Path:
        return self.root / EPHEMERAL / file_name(sampler_id)

    def files(self, path: str) -> list[Path]:
        """Return the files of a checkpoint without its record. Raises NotFound."""
        _, directory = self.checkpoint(path)
        return sorted(file for file in directory.iterdir() if file.name != RECORD)

    def set_ttl(self, path: str, seconds: int | None) -> None:
        """Set the time to live of a checkpoint; None for ever. Raises NotFound."""
        record, directory = self.checkpoint(path)
        expires = None if seconds is None else now() + timedelta(seconds=seconds)
        _write(directory / RECORD, msgspec.structs.replace(record, expires=expires))

    def set_public(self, path: str, public: bool) -> None:
        """Publish or unpublish a checkpoint. Raises NotFound."""
        record, directory = self.checkpoint(path)
        _write(directory / RECORD, msgspec.structs.replace(record, public=public))

    def delete(self, path: str) -> None:
        """Delete a checkpoint. Raises NotFound."""
        _, directory = self.checkpoint(path)
        shutil.rmtree(directory)

    def sweep(self, ephemeral_age: timedelta) -> None:
        """Delete expired checkpoints, and unnamed samplers older than `ephemeral_age`."""
        for record in _all(self.root.glob(f"runs/*/*weights/*/{RECORD}"), CheckpointRecord):
            if record.expires is not None and record.expires < now():
                shutil.rmtree(self.directory(record))
        for sampler in self.samplers():
            where = self.ephemeral(sampler.sampler_id)
            if sampler.created < now() - ephemeral_age and where.exists():
                shutil.rmtree(where)
                (self.root / "samplers" / f"{file_name(sampler.sampler_id)}.json").unlink()

    def _directory(self, model_id: str, kind: str, name: str) -> Path:
        return self.root / "runs" / file_name(model_id) / kind / file_name(name)


def parse(path: str) -> tuple[str, Kind, str]:
    """Return run, kind and name of a checkpoint path. Raises BadRequest for another path."""
    parts = path.removeprefix(SCHEME).split("/")
    kind = next((kind for kind in KINDS if parts[1:2] == [kind]), None)
    if not path.startswith(SCHEME) or len(parts) != 3 or kind is None or not all(parts):
        expected = " or ".join(f"{SCHEME}RUN/{kind}/NAME" for kind in KINDS)
        raise BadRequest(f"path is {path!r:.200}: expected {expected}", param="path")
    return parts[0], kind, parts[2]


def now() -> datetime:
    """Return the time in UTC, as responses of the API carry it."""
    return datetime.now(UTC)


def file_name(name: str) -> str:
    """Return a file name for an id, quoted so that the id cannot contain a path."""
    if not name or len(name) > 200:
        raise BadRequest(f"{name!r:.80} is not an id or name: expected 1 to 200 characters")
    return quote(name, safe=" :@=+,").replace(".", "%2E")


def _write(path: Path, record: msgspec.Struct) -> None:
    partial = path.with_name(f".{path.name}.tmp")
    partial.write_bytes(msgspec.json.encode(record))
    partial.chmod(0o600)
    partial.replace(path)


def _read(path: Path, kind: type[T], label: str) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        raise NotFound(f"{label} does not exist on this server") from None


def _all(paths: Iterator[Path], kind: type[T]) -> list[T]:
    # Names with a dot are being written. Complete ones have no dot: see `file_name`.
    complete = (path for path in paths if not path.parent.name.startswith("."))
    records = [
        msgspec.json.decode(path.read_bytes(), type=kind)
        for path in complete
        if not path.name.startswith(".")
    ]
    return sorted(records, key=lambda record: record.created, reverse=True)  # type: ignore[attr-defined]
