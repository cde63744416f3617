"""Reading of a run's configuration, for the commands that run its tasks."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.running_gateways import find_control_plane
from lockstep.settings import Settings
from lockstep.tokens.errors import BadRequest

if TYPE_CHECKING:
    from lockstep.train.config import TrainConfig


def read_run(config: Path) -> TrainConfig:
    """Return the run that a file describes, with the admin token of the gateway on this machine.

    From now on the environment and reward may be modules in the working directory. Raises
    BadRequest for an invalid file.
    """
    from lockstep.train.config import TrainConfig

    run = TrainConfig.read(config)
    import_from_working_directory()
    if run.serve.admin_token is None and run.serve.admin_token_file is None:
        _, token = find_control_plane(run.serve.admin_url, None, Settings.read())
        run = replace(run, serve=replace(run.serve, admin_token=token))
    return run


def import_from_working_directory() -> None:
    """Let the environment and reward of a run be modules in the working directory."""
    if (here := os.getcwd()) not in sys.path:
        # Last in the path, so that no file in the working directory shadows a package. Unlike
        # `python`, a console script does not have that directory in its path.
        sys.path.append(here)


def parse_changes(arguments: Iterable[str]) -> dict[str, Any]:
    """Return the fields and values of `FIELD=VALUE` arguments. A value is TOML, or else text."""
    changes: dict[str, Any] = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if not equals:
            raise BadRequest(f"--change {argument}: expected FIELD=VALUE", param="--change")
        try:
            changes[name] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            changes[name] = text
    return changes
