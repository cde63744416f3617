"""Everything that the environment decides, read once, under the prefix LOCKSTEP_."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

from lockstep.tokens.errors import BadRequest

PREFIX = "LOCKSTEP_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Values from the environment; options of a command beat them.

    LOCKSTEP_ADMIN_TOKEN  the bearer token of admin routes; made and written to a file if absent
    LOCKSTEP_LOG_LEVEL    debug, info, warning or error
    """

    admin_token: str | None = None
    log_level: str = "warning"

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """The settings. Raises BadRequest for a LOCKSTEP_ variable that nobody knows."""
        known = {PREFIX + field.name.upper(): field.name for field in fields(cls)}
        values = {}
        for name, value in environ.items():
            if not name.startswith(PREFIX):
                continue
            if name not in known:
                raise BadRequest(
                    f"environment variable {name} is not known: expected one of {', '.join(known)}",
                    param=name,
                )
            values[known[name]] = value
        settings = cls(**values)
        if settings.log_level not in ("debug", "info", "warning", "error"):
            raise BadRequest(
                f"{PREFIX}LOG_LEVEL is {settings.log_level!r}: expected debug, info, warning, error"
            )
        return settings
