"""Settings from the environment, read once, under the prefix LOCKSTEP_."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lockstep.tokens.errors import BadRequest

PREFIX = "LOCKSTEP_"
API_KEYS = PREFIX + "API_KEYS"
ADMIN_TOKEN = PREFIX + "ADMIN_TOKEN"
ADMIN_TOKEN_FILE = PREFIX + "ADMIN_TOKEN_FILE"
STORE = PREFIX + "STORE"
TRACE = PREFIX + "TRACE"
SHORTEST_KEY = 8
LOG_LEVELS = ("debug", "info", "warning", "error")
SET_FOR_PROGRAMS = frozenset({PREFIX + "ROLLOUT", PREFIX + "TASK"})
"""Variables that `lockstep train` sets for the agents and rewards it starts, which may use Lockstep
too.
"""
SERVICE_NAME = re.compile(r"LOCKSTEP(_[A-Z0-9_]+)?_SERVICE_(HOST|PORT(_[A-Z0-9_]+)?)")
SERVICE_PORT = re.compile(
    r"LOCKSTEP(_[A-Z0-9_]+)?_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?"
)  # fmt: skip
SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Values from the environment; command-line options take precedence.

    LOCKSTEP_ADMIN_TOKEN     bearer token of admin routes; if absent, one is created in a file
    LOCKSTEP_ADMIN_TOKEN_FILE  file that contains it, instead
    LOCKSTEP_ADMIN_URL       control plane for `lockstep state`, `pause` and similar commands
    LOCKSTEP_API_KEYS        keys of a gateway's or worker's data port, by comma; absent: open
    LOCKSTEP_KEY_FILE        file of a gateway's keys and their tenants; see `lockstep keys`
    LOCKSTEP_CHECKPOINT_CACHE  directory for checkpoints from object stores, shared by the processes
                             of a host; by default in the user's cache directory
    LOCKSTEP_CHECKPOINT_CACHE_GB  most GB in it; default: half of the file system
    LOCKSTEP_STORE           PostgreSQL database of a gateway, like --store
    LOCKSTEP_WORKER_API_KEY  key that a gateway sends to its workers
    LOCKSTEP_WORKER_ADMIN_TOKEN  admin token of its workers, if it is not the gateway's own
    LOCKSTEP_TLS_CA          PEM file of certificates that this process trusts as a client
    LOCKSTEP_TLS_CERT        certificate that it presents as a client, and
    LOCKSTEP_TLS_KEY         its key; for servers that require one
    LOCKSTEP_LOG_LEVEL       debug, info, warning or error
    LOCKSTEP_TRACE           1: send spans to an OpenTelemetry collector, as --trace does
    LOCKSTEP_SGLANG_PYTHON   Python interpreter of the SGLang environment; default .venv-sglang
    LOCKSTEP_VERIFIERS       sessions: every verifiers train client in this process uses them
    LOCKSTEP_VLLM_PYTHON     Python interpreter of the vLLM environment; default .venv-vllm
    LOCKSTEP_VLLM_SKIP_REPAIRS  repairs that vLLM's worker extension skips, comma separated

    Any other name with this prefix is an error, because it would have no effect. Variables that
    Kubernetes sets for a Service called lockstep, or lockstep-something, are ignored.
    """

    admin_token: str | None = None
    admin_token_file: Path | None = None
    admin_url: str | None = None
    api_keys: tuple[str, ...] = ()
    key_file: Path | None = None
    checkpoint_cache: Path | None = None
    checkpoint_cache_gb: str | None = None
    store: str | None = None
    worker_api_key: str | None = None
    worker_admin_token: str | None = None
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    log_level: str = "warning"
    trace: bool = False
    verifiers: str | None = None
    vllm_python: str | None = None
    sglang_python: str | None = None
    vllm_skip_repairs: str = ""

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Read the settings. Raises BadRequest for an unknown LOCKSTEP_ variable."""
        names = {PREFIX + field.name.upper(): field.name for field in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in environ.items():
            if not name.startswith(PREFIX) or name in SET_FOR_PROGRAMS:
                continue
            if _is_kubernetes(name, value):
                continue
            if name not in names:
                raise _unknown(name, list(names))
            convert = CONVERSIONS.get(name)
            values[names[name]] = value if convert is None else convert(value)
        if ADMIN_TOKEN_FILE in environ:
            values |= _token_of(environ)
        settings = cls(**values)
        if settings.log_level not in LOG_LEVELS:
            raise BadRequest(
                f"{PREFIX}LOG_LEVEL is {settings.log_level!r}: expected {', '.join(LOG_LEVELS)}"
            )
        return settings


def state_home(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory of Lockstep's files for this user: $XDG_STATE_HOME/lockstep, by default
    ~/.local/state/lockstep. It may not exist yet.
    """
    directory = Path(environ.get("XDG_STATE_HOME", ""))
    # The XDG specification says to ignore relative paths.
    return (directory if directory.is_absolute() else Path.home() / ".local" / "state") / "lockstep"


def _is_kubernetes(name: str, value: str) -> bool:
    """Return whether Kubernetes set it: every pod gets the addresses of Services beside it."""
    if SERVICE_NAME.fullmatch(name) or SERVICE_PORT.fullmatch(name):
        return True
    # The name alone does not decide: LOCKSTEP_PORT=9000 would be a user's mistaken setting.
    return name.endswith("_PORT") and SERVICE_URL.match(value) is not None


def _unknown(name: str, names: list[str]) -> BadRequest:
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    meant = f"did you mean {close[0]}? " if close else ""
    return BadRequest(
        f"environment variable {name} is not known: {meant}Unset it, or use one of "
        f"{', '.join(names)}",
        param=name,
    )


def _token_of(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the token in the file named by the environment. Raises BadRequest if there is none."""
    path = Path(environ[ADMIN_TOKEN_FILE])
    if ADMIN_TOKEN in environ:
        raise BadRequest(
            f"{ADMIN_TOKEN} and {ADMIN_TOKEN_FILE} are both set: unset one of them",
            param=ADMIN_TOKEN_FILE,
        )
    return {"admin_token": read_token(path, ADMIN_TOKEN_FILE), "admin_token_file": path}


def read_token(path: Path, param: str = "token_file") -> str:
    """Return the token in a file. Raises BadRequest if it cannot be read or is empty."""
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise BadRequest(f"{param} {path} cannot be read: {reason}", param=param) from None
    if not token:
        raise BadRequest(f"{param} {path} is empty: expected the admin token", param=param)
    return token


def _keys(value: str) -> tuple[str, ...]:
    """Return the keys in `value`. Raises BadRequest for none: an empty list must not mean
    "open".
    """
    keys = tuple(key.strip() for key in value.split(",") if key.strip())
    if not keys or min(map(len, keys)) < SHORTEST_KEY:
        raise BadRequest(
            f"{API_KEYS} has {len(keys)} keys: expected at least one, none shorter than "
            f"{SHORTEST_KEY} characters, with commas between; unset it for no keys",
            param=API_KEYS,
        )
    return keys


def _switch(value: str) -> bool:
    """Return whether it is on. Raises BadRequest for anything but 1 and 0."""
    if value not in ("0", "1", ""):
        raise BadRequest(f"{TRACE} is {value!r}: expected 1 or 0", param=TRACE)
    return value == "1"


CONVERSIONS: Mapping[str, Callable[[str], object]] = {
    API_KEYS: _keys,
    PREFIX + "KEY_FILE": Path,
    PREFIX + "CHECKPOINT_CACHE": Path,
    PREFIX + "TLS_CA": Path,
    TRACE: _switch,
    PREFIX + "TLS_CERT": Path,
    PREFIX + "TLS_KEY": Path,
}
"""Conversions of variables whose value is not a string."""
