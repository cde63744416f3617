"""The state of a gateway: the version its fleet serves, and its sessions.

It is in the store that --store names, else in the directory of --state-dir, else in one directory
per model under the user's state home. Nothing is written to the working directory.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from lockstep.checkpoint.files import read_object
from lockstep.checkpoint.manifest import INDEX, WEIGHTS
from lockstep.checkpoint.stores.url import AllowedRoots, is_url
from lockstep.cli.serving.arguments import GatewayArguments
from lockstep.cli.serving.model_identity import ModelIdentity
from lockstep.cli.serving.shared_store import check_shared
from lockstep.cli.serving.sources import WorkerSource
from lockstep.settings import Settings, state_home
from lockstep.storage import Store, open_store
from lockstep.storage.desired_state import Desired
from lockstep.storage.file_lock import FileLock
from lockstep.storage.private_directory import close_to_others
from lockstep.storage.protocols import ControlStore
from lockstep.storage.sqlite import MEMORY
from lockstep.storage.sqlite.backend import SESSION_FILE, STATE_FILE, sqlite_url
from lockstep.tokens.errors import (
    BadRequest,
    CheckpointError,
    Conflict,
    Forbidden,
    LockstepError,
)

log = logging.getLogger(__name__)
SQLITE_FILES = ("", "-wal", "-shm")
FIRST_RELEASE = {
    "lockstep-state.sqlite": STATE_FILE,
    "lockstep-sessions.sqlite": SESSION_FILE,
}
"""Files of the first release, which it wrote to the working directory, and their names now."""
WAY_OUT = "stop it, or give another --state-dir"


@dataclass(frozen=True, slots=True)
class GatewayState:
    """The store of a gateway, and what an earlier run left in it.

    `directory` is None for a store in memory and for a shared one. `resumed` is the version of the
    earlier run, `checkpoint` the path of its weights, `set_aside` where --fresh moved it.
    """

    store: Store
    directory: Path | None = None
    resumed: str | None = None
    checkpoint: str | None = None
    set_aside: Path | None = None


@asynccontextmanager
async def open_state(
    arguments: GatewayArguments, settings: Settings, source: WorkerSource
) -> AsyncIterator[GatewayState]:
    """Open the state for the workers of `source` while the block runs.

    Raises BadRequest for options that do not fit, when another process uses the state, or when it
    is of another model; CheckpointError when weights that it needs are gone, Conflict when they
    were never in a file; Unavailable when the store's server cannot be reached.
    """
    shared_url = arguments.store or settings.store
    if shared_url is not None:
        check_shared(shared_url, arguments, settings)
        async with open_store(shared_url) as store:
            if store.keys is not None:
                await store.keys.follow()
            desired = Desired() if arguments.fresh else await store.control.desired()
            _check_files(desired, "the store", source.starts_workers)
            yield GatewayState(store, resumed=desired.version, checkpoint=desired.checkpoint)
    elif arguments.state_dir == MEMORY or (
        arguments.state_dir is None and arguments.sessions == MEMORY
    ):
        async with open_store(sqlite_url(None, arguments.sessions)) as store:
            yield GatewayState(store)
    else:
        model = await source.identity()
        directory = _make_directory(arguments, model)
        if arguments.state_dir is None:
            _mention_first_release(Path.cwd())
        else:
            _take_over_first_release(directory)
        aside = _set_aside(directory) if arguments.fresh else None
        url = sqlite_url(directory, arguments.sessions)
        async with open_store(url, model=model.label) as store:
            desired = await _resumable(store.control, directory, source.starts_workers)
            yield GatewayState(store, directory, desired.version, desired.checkpoint, aside)


def _make_directory(arguments: GatewayArguments, model: ModelIdentity) -> Path:
    directory = (
        Path(arguments.state_dir).absolute()
        if arguments.state_dir is not None
        else state_home() / model.directory_name
    )
    try:
        for place in (state_home(), directory) if arguments.state_dir is None else (directory,):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A directory that existed may be open to others: conversations are stored in it.
        close_to_others(directory)
    except OSError as error:
        raise BadRequest(
            f"the state directory {directory} cannot be created ({error.strerror}): give another "
            "--state-dir, or memory",
            param="state_dir",
        ) from None
    return directory


def _mention_first_release(directory: Path) -> None:
    """Warn of a state of the first release. It may be of another model, so it is not read."""
    files = [name for name in FIRST_RELEASE if (directory / name).exists()]
    if files:
        log.warning(
            "%s of the first release in %s %s not read: --state-dir %s continues with it, or move "
            "it away",
            " and ".join(files), directory, "is" if len(files) == 1 else "are", directory,
        )  # fmt: skip


def _take_over_first_release(directory: Path) -> None:
    """Rename the files of the first release, whose contents are still read. A directory that has a
    newer state keeps both."""
    files = [name for name in FIRST_RELEASE if (directory / name).exists()]
    if not files or any((directory / name).exists() for name in FIRST_RELEASE.values()):
        return
    with ExitStack() as stack:
        for name in files:
            stack.enter_context(FileLock(directory / name, way_out=WAY_OUT))
        for name in files:
            for ending in reversed(SQLITE_FILES):  # the database itself last
                with suppress(FileNotFoundError):
                    (directory / (name + ending)).rename(directory / (FIRST_RELEASE[name] + ending))
    log.warning("state of the first release in %s taken over: %s", directory, ", ".join(files))


def _set_aside(directory: Path) -> Path | None:
    """Move the state and the sessions into a new directory; nothing is deleted."""
    files = [
        directory / (name + ending)
        for name in (STATE_FILE, SESSION_FILE)
        for ending in SQLITE_FILES
        if (directory / (name + ending)).exists()
    ]
    if not files:
        return None
    with ExitStack() as stack:
        for name in (STATE_FILE, SESSION_FILE):
            stack.enter_context(FileLock(directory / name, way_out=WAY_OUT))
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
        aside = directory / f"before-{stamp}"
        aside.mkdir(mode=0o700)
        for file in files:
            # SQLite removes its own extra files when the last connection closes.
            with suppress(FileNotFoundError):
                file.rename(aside / file.name)
    return aside


async def _resumable(control: ControlStore, directory: Path, starts_workers: bool) -> Desired:
    """Return the state to resume. Raises when new workers could not be brought to it."""
    desired = await control.desired()
    if starts_workers and desired.checkpoint is None:
        if len(desired.agreed) > 1:
            raise Conflict(
                f"the fleet last served version {desired.version!r}, which came by broadcast or "
                f"shared memory and is in no file (state in {directory}): --fresh starts over with "
                "the model's own weights",
                param="state_dir",
            )
        if not desired.adapters:
            # The weights were never updated, so the fleet accepts what the workers start with now.
            # Their logprobs may differ from the last run's if another machine computes them.
            desired = Desired()
            await control.save(desired)
    _check_files(desired, str(directory), starts_workers)
    return desired


def _check_files(desired: Desired, place: str, starts_workers: bool) -> None:
    """Raise CheckpointError when new workers could not load the state; otherwise only warn."""
    if (missing := _missing(desired)) is None:
        return
    what, file = missing
    if starts_workers:
        raise CheckpointError(
            f"{file} is missing: the fleet last served {what} (state in {place}); put it back, or "
            "--fresh starts over with the model's own weights",
            param="state_dir",
        )
    log.warning("%s is missing: workers that do not hold %s yet cannot join", file, what)


def check_roots(roots: Sequence[str | Path]) -> None:
    """Raise BadRequest for a checkpoint root that is no directory and no prefix of a store."""
    for root in AllowedRoots.of(roots).directories or ():
        if not root.is_dir():
            raise BadRequest(
                f"--checkpoint-root {root} is not a directory: create it, or correct the path",
                param="checkpoint_root",
            )


def check_inside(desired: Desired, roots: Sequence[str | Path]) -> None:
    """Raise Forbidden when a fleet would resume weights or an adapter from outside its roots."""
    if not roots:
        return
    allowed = AllowedRoots.of(roots)
    paths = {name: spec.path for name, spec in desired.adapters.items()}
    sources = {f"adapter {name!r}": path for name, path in paths.items()}
    if desired.checkpoint is not None:
        sources[f"version {desired.version!r}"] = desired.checkpoint
    for what, path in sources.items():
        if not allowed.contain(path):
            raise Forbidden(
                f"the fleet last served {what} from {path}, which is outside --checkpoint-root "
                f"{', '.join(map(str, roots))}: add a root that contains it, or --fresh starts "
                "over with the model's own weights",
                param="checkpoint_root",
            )


def _missing(desired: Desired) -> tuple[str, Path] | None:
    """Return the weights or adapter that cannot be loaded, and the first missing file."""
    # Workers fetch checkpoints of a store themselves.
    if desired.checkpoint is not None and not is_url(desired.checkpoint):
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
