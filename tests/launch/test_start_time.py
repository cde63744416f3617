"""A large model has longer to start: its servers are not given up on while they load it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from lockstep.launch.start_time import BASE_SECONDS, DOWNLOAD_SECONDS, start_seconds
from lockstep.launch.supervisor import Child, Command, Supervisor
from lockstep.tokens.errors import EngineFailure


def test_the_time_follows_the_size_of_the_model(tmp_path: Path) -> None:
    assert BASE_SECONDS < start_seconds("tiny") < BASE_SECONDS + 1
    assert start_seconds("some/name-on-the-hub") == DOWNLOAD_SECONDS
    for number in range(2):
        with (tmp_path / f"model-{number}.safetensors").open("wb") as file:
            file.truncate(8 << 30)
    # A model of 16 GiB on a disk of 50 MB/s.
    assert start_seconds(str(tmp_path)) > BASE_SECONDS + 300


async def test_a_child_is_given_its_own_time_to_be_ready() -> None:
    slow = "import time; time.sleep(60)"

    def command(_: Child) -> Command:
        return Command((sys.executable, "-c", slow), ready_seconds=0.3)

    async with asyncio.timeout(30):
        with pytest.raises(EngineFailure, match="not ready after 0 s"):
            async with Supervisor(["w0"], command) as supervisor:
                await supervisor.ready()
