"""What all tests share: gateways that they start keep their state in a directory of the run."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    home = tempfile.mkdtemp(prefix="lockstep-tests-")
    os.environ["XDG_STATE_HOME"] = home
    config.add_cleanup(lambda: shutil.rmtree(Path(home), ignore_errors=True))
