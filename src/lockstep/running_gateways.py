"""Registry of the gateways that this user runs on this machine, so that commands find them.

Each gateway writes one file into a directory that only the user may read, and holds a lock on it
while it lives: an unlocked entry belongs to a gateway that has ended, whatever process has its pid.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from lockstep.settings import Settings, read_token, state_home
from lockstep.tokens.errors import BadRequest

log = logging.getLogger(__name__)
DEFAULT_URL = "http://127.0.0.1:8001"
CONNECT_SECONDS = 2.0


class RunningGateway(msgspec.Struct, frozen=True):
    """One gateway: its addresses, and the file with its admin token, if it has one.

    `state_dir` is None if its state is in memory. `gpus` are those of the workers it placed.
    """

    url: str
    admin_url: str
    model: str
    pid: int
    token_file: str | None = None
    state_dir: str | None = None
    host: str = msgspec.field(default_factory=socket.gethostname)
    gpus: dict[str, tuple[str, ...]] = {}


def registry_dir() -> Path:
    """Return the directory of the entries; it may not exist yet."""
    return state_home() / "running"


@contextmanager
def registered(gateway: RunningGateway) -> Iterator[None]:
    """Register this gateway while the block runs, so that other commands find it.

    If the state home is not writable, log it; the gateway serves without an entry.
    """
    try:
        handle, path = _write(gateway)
    except OSError as error:
        log.warning(
            "other commands will not find this gateway by themselves, as %s cannot be written: %s",
            registry_dir(), error.strerror,
        )  # fmt: skip
        yield
        return
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def running_gateways() -> list[RunningGateway]:
    """Return the running gateways by admin URL, and remove entries of gateways that have ended."""
    entries = []
    for path in registry_dir().glob("*.json"):
        entry = _read(path)
        if entry is not None and entry.host == socket.gethostname():
            entries.append(entry)
    return sorted(entries, key=lambda entry: entry.admin_url)


def choose_gateway(url: str | None = None) -> RunningGateway | None:
    """Return the gateway with that admin URL, or the only one; None if there is none.

    Raises BadRequest that lists them if there are several and none was named.
    """
    gateways = running_gateways()
    if url is not None:
        return next((gateway for gateway in gateways if gateway.admin_url == url.rstrip("/")), None)
    if len(gateways) > 1:
        lines = [
            f"\n  --url {gateway.admin_url}  serves {gateway.model} at {gateway.url}, "
            f"process {gateway.pid}, state in {gateway.state_dir or 'memory'}"
            for gateway in gateways
        ]
        raise BadRequest(
            f"{len(gateways)} gateways run here: choose one by its admin URL, as --url of a "
            f"command or url of connect_fleet{''.join(lines)}",
            param="url",
        )
    return gateways[0] if gateways else None


def find_control_plane(
    url: str | None, token_file: Path | None, settings: Settings
) -> tuple[str, str]:
    """Return the admin URL and token: as passed, else those of the gateway running here.

    A gateway that wrote its own token file is addressed with that token. Raises BadRequest if
    several are running and none was named, if none is running, or if there is no token.
    """
    named = url or settings.admin_url
    gateway = choose_gateway(named)
    if token_file is not None:
        token: str | None = read_token(token_file)
    elif gateway is not None and gateway.token_file is not None:
        token = read_token(Path(gateway.token_file))
    else:
        token = settings.admin_token
    where = named or (gateway.admin_url if gateway is not None else None)
    if where is None and token is not None:
        where = DEFAULT_URL
    if where is None:
        raise BadRequest(
            "no gateway of yours runs on this machine: start one with `lockstep serve`, or give "
            "the admin URL and the token of one that runs elsewhere (--url and --token-file of a "
            "command, url and token_file of connect_fleet)",
            param="url",
        )
    if token is None:
        token_is = (
            "give it with --token-file (token_file in Python), or set LOCKSTEP_ADMIN_TOKEN as it "
            "was set for the gateway"
        )
        if not _listens(where):
            raise BadRequest(
                f"nothing listens at {where}: start a gateway with `lockstep serve`, or name the "
                "admin URL of one that runs; one that is not yours on this machine needs its admin "
                f"token too: {token_is}",
                param="url",
            )
        raise BadRequest(
            f"the gateway at {where} needs its admin token: {token_is}", param="token_file"
        )
    return where, token


def _listens(url: str) -> bool:
    """Whether a connection to the host and port of a URL is accepted."""
    parts = urlsplit(url)
    try:
        address = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        with socket.create_connection(address, CONNECT_SECONDS):
            return True
    except (OSError, ValueError):
        return False


def _write(gateway: RunningGateway) -> tuple[int, Path]:
    import fcntl  # not available on Windows, where no gateway runs

    directory = registry_dir()
    directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)
    directory.chmod(0o700)
    path = directory / f"{gateway.host}-{gateway.pid}.json"
    new = path.with_suffix(".new")
    handle = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(handle, msgspec.json.encode(gateway))
        os.rename(new, path)
    except BaseException:
        os.close(handle)
        raise
    return handle, path


def _read(path: Path) -> RunningGateway | None:
    """Return the entry, or None if its gateway has ended."""
    import fcntl

    try:
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:  # locked: its gateway lives
                return msgspec.json.decode(file.read(), type=RunningGateway)
            with suppress(FileNotFoundError):
                path.unlink()
    except FileNotFoundError:
        return None  # the gateway has just ended
    except (OSError, msgspec.DecodeError) as error:
        log.warning("%s is no entry of a running gateway: %s", path, error)
    return None
