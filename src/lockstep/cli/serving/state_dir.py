"""The state directory of a gateway: the version its fleet serves, and its sessions.

It is given by --state-dir, else there is one for each model under the user's state home. Nothing
is written to the working directory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from lockstep.checkpoint.files import read_object
from lockstep.checkpoint.manifest import INDEX, WEIGHTS
from lockstep.cli.serving.arguments import GatewayArguments
from lockstep.cli.serving.model_identity import ModelIdentity
from lockstep.fleet.control.desired import MEMORY, Desired, StateStore
from lockstep.fleet.control.file_lock import FileLock
from lockstep.settings import state_home
from lockstep.tokens.errors import BadRequest, CheckpointError, Conflict, LockstepError

log = logging.getLogger(__name__)
STATE = "state.sqlite"
SESSIONS = "sessions.sqlite"
SQLITE_FILES = ("", "-wal", "-shm")
WAY_OUT = "stop it, or give another --state-dir"


@dataclass(frozen=True, slots=True)
class GatewayState:
    """The state that a gateway starts with. `directory` is None where it is in memory.

    `resumed` is the version that an earlier run left, `checkpoint` where its weights are, and
    `set_aside` where --fresh has moved what was there.
    """

    store: StateStore
    sessions: str
    directory: Path | None = None
    resumed: str | None = None
    checkpoint: str | None = None
    set_aside: Path | None = None


def in_memory(arguments: GatewayArguments) -> bool:
    """Whether the fleet's state is in memory only."""
    return arguments.state_dir == MEMORY or (
        arguments.state_dir is None and arguments.sessions == MEMORY
    )


@contextmanager
def open_state(
    arguments: GatewayArguments, model: ModelIdentity | None, *, starts_workers: bool
) -> Iterator[GatewayState]:
    """The state of this model's fleet, held for this process while the block runs.

    `starts_workers` says that the workers begin with the model's own weights. Raises BadRequest
    when another process uses it or it is of another model, CheckpointError when weights that it
    needs are gone, Conflict when they were never in a file.
    """
    if in_memory(arguments) or model is None:
        yield GatewayState(StateStore(), arguments.sessions or MEMORY)
        return
    directory = _make_directory(arguments, model)
    sessions = arguments.sessions or str(directory / SESSIONS)
    aside = _set_aside(directory) if arguments.fresh else None
    store = StateStore(str(directory / STATE), model=model.label)
    try:
        desired = _resumable(store, directory, starts_workers)
        yield GatewayState(
            store, sessions, directory, desired.version, desired.checkpoint, set_aside=aside
        )
    finally:
        store.close()


def _make_directory(arguments: GatewayArguments, model: ModelIdentity) -> Path:
    directory = (
        Path(arguments.state_dir).absolute()
        if arguments.state_dir is not None
        else state_home() / model.directory_name
    )
    try:
        for place in (state_home(), directory) if arguments.state_dir is None else (directory,):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise BadRequest(
            f"the state directory {directory} cannot be created ({error.strerror}): give another "
            "--state-dir, or memory",
            param="state_dir",
        ) from None
    return directory


def _set_aside(directory: Path) -> Path | None:
    """Moves the state and the sessions into a new directory; nothing is deleted."""
    files = [
        directory / (name + ending)
        for name in (STATE, SESSIONS)
        for ending in SQLITE_FILES
        if (directory / (name + ending)).exists()
    ]
    if not files:
        return None
    with ExitStack() as stack:
        for name in (STATE, SESSIONS):
            stack.enter_context(FileLock(directory / name, way_out=WAY_OUT))
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
        aside = directory / f"before-{stamp}"
        aside.mkdir(mode=0o700)
        for file in files:
            # SQLite removes its own extra files when the last connection closes.
            with suppress(FileNotFoundError):
                file.rename(aside / file.name)
    return aside


def _resumable(store: StateStore, directory: Path, starts_workers: bool) -> Desired:
    """The state to resume. Raises when new workers could not be brought to it."""
    desired = store.desired()
    if starts_workers and desired.checkpoint is None:
        if len(desired.agreed) > 1:
            raise Conflict(
                f"the fleet last served version {desired.version!r}, which came by broadcast or "
                f"shared memory and is in no file (state in {directory}): --fresh starts over with "
                "the model's own weights",
                param="state_dir",
            )
        if not desired.adapters:
            # The weights were never updated, so the fleet accepts what the workers start with now:
            # their logprobs may differ from the last run's, as another machine may compute them.
            desired = Desired()
            store.save(desired)
    if (missing := _missing(desired)) is not None:
        what, file = missing
        if starts_workers:
            raise CheckpointError(
                f"{file} is missing: the fleet last served {what} (state in {directory}); put it "
                "back, or --fresh starts over with the model's own weights",
                param="state_dir",
            )
        log.warning("%s is missing: workers that do not hold %s yet cannot join", file, what)
    return desired


def _missing(desired: Desired) -> tuple[str, Path] | None:
    """The weights or adapter that cannot be loaded any more, and the first missing file."""
    if desired.checkpoint is not None:
        file = _missing_file(Path(desired.checkpoint))
        if file is not None:
            return f"version {desired.version!r} from there", file
    for name, spec in desired.adapters.items():
        if not Path(spec.path).is_dir():
            return f"adapter {name!r} from there", Path(spec.path)
    return None


def _missing_file(checkpoint: Path) -> Path | None:
    if not checkpoint.is_dir():
        return checkpoint
    if (checkpoint / WEIGHTS).is_file():
        return None
    if not (checkpoint / INDEX).is_file():
        return checkpoint / WEIGHTS
    try:
        shards = read_object(checkpoint / INDEX).get("weight_map", {})
    except LockstepError:
        return checkpoint / INDEX
    names = sorted(set(shards.values())) if isinstance(shards, dict) else []
    return next((checkpoint / name for name in names if not (checkpoint / name).is_file()), None)
