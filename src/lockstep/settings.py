"""Everything that the environment decides, read once, under the prefix LOCKSTEP_."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lockstep.tokens.errors import BadRequest

PREFIX = "LOCKSTEP_"
API_KEYS = PREFIX + "API_KEYS"
SHORTEST_KEY = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Values from the environment; options of a command beat them.

    LOCKSTEP_ADMIN_TOKEN     the bearer token of admin routes; made and written to a file if absent
    LOCKSTEP_ADMIN_URL       where `lockstep state`, `pause` and the like find the control plane
    LOCKSTEP_API_KEYS        keys of the gateway's data plane, with commas between; absent: open
    LOCKSTEP_WORKER_API_KEY  the key that a gateway sends to its workers
    LOCKSTEP_LOG_LEVEL       debug, info, warning or error
    LOCKSTEP_VLLM_PYTHON     the python of the environment that has vLLM; else .venv-vllm's
    LOCKSTEP_VLLM_SKIP_REPAIRS  repairs that vLLM's worker extension leaves out, with commas between
    """

    admin_token: str | None = None
    admin_url: str = "http://127.0.0.1:8001"
    api_keys: tuple[str, ...] = ()
    worker_api_key: str | None = None
    log_level: str = "warning"
    vllm_python: str | None = None
    vllm_skip_repairs: str = ""

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """The settings. Raises BadRequest for a LOCKSTEP_ variable that nobody knows."""
        known = {PREFIX + field.name.upper(): field.name for field in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in environ.items():
            if not name.startswith(PREFIX):
                continue
            if name not in known:
                raise BadRequest(
                    f"environment variable {name} is not known: expected one of {', '.join(known)}",
                    param=name,
                )
            values[known[name]] = _keys(value) if name == API_KEYS else value
        settings = cls(**values)
        if settings.log_level not in ("debug", "info", "warning", "error"):
            raise BadRequest(
                f"{PREFIX}LOG_LEVEL is {settings.log_level!r}: expected debug, info, warning, error"
            )
        return settings


def _keys(value: str) -> tuple[str, ...]:
    """The keys in `value`. Raises BadRequest for none: whoever sets it does not mean "open"."""
    keys = tuple(key.strip() for key in value.split(",") if key.strip())
    if not keys or min(map(len, keys)) < SHORTEST_KEY:
        raise BadRequest(
            f"{API_KEYS} has {len(keys)} keys: expected at least one, none shorter than "
            f"{SHORTEST_KEY} characters, with commas between; unset it for no keys",
            param=API_KEYS,
        )
    return keys
