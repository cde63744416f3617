"""The processes of a local Dynamo deployment, with a stand-in for their Python."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from lockstep.launch.local_dynamo import LocalDynamo
from lockstep.tokens.errors import BadRequest, EngineFailure, Unavailable

STAND_IN = """#!{python}
import json, os, signal, sys, time
worker = "worker" in sys.argv
name = "worker" if worker else "frontend"
def note(what):
    with open({log!r}, "a") as file:
        file.write(f"{{what}} {{name}}\\n")
def stop(*_):
    note("stop")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
if worker:
    line = {{"event": "ready", "system_url": "http://s", "model": "tiny", "pid": os.getpid(),
            "instance_id": "7", "store": os.environ["DYN_FILE_KV"]}}
    print(json.dumps(line), flush=True)
note("start")
time.sleep(600)
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    path = tmp_path / "python"
    path.write_text(STAND_IN.format(python=sys.executable, log=str(tmp_path / "log")))
    path.chmod(0o755)
    return path


async def test_workers_stop_before_the_frontend_and_the_store_is_removed(
    stand_in: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    async with LocalDynamo("tiny", 2, python=stand_in) as deployment:
        await asyncio.gather(*(worker.ready for worker in deployment.workers))
        assert [(row["name"], row["instance_id"]) for row in deployment.rows] == [
            ("w0", "7"), ("w1", "7")
        ]  # fmt: skip
        store = Path(deployment.workers[0].ready.result()["store"])
        assert store.is_dir()
        assert deployment.frontend is not None
        assert deployment.frontend.url != deployment.frontend.system_url
        while log.read_text().count("start") < 3:
            await asyncio.sleep(0.02)
    assert log.read_text().split("\n")[3:] == ["stop worker", "stop worker", "stop frontend", ""]
    assert not store.exists()


@pytest.mark.failure_mode("F35")
async def test_a_frontend_that_ends_at_its_start_is_an_error_and_dead_processes_restart(
    stand_in: Path,
) -> None:
    async with LocalDynamo("tiny", 1, python=stand_in) as deployment:
        (worker,), frontend = deployment.workers, deployment.frontend
        await worker.ready
        assert frontend is not None
        for child in (worker, frontend):
            assert child.process is not None
            child.process.kill()
        with pytest.raises(EngineFailure, match="frontend ended with code -9"):
            await deployment.failed()
        async with asyncio.timeout(20):
            while not (worker.restarts == frontend.restarts == 1 and worker.state == "running"):
                await asyncio.sleep(0.02)


def test_a_deployment_without_workers_is_rejected(stand_in: Path) -> None:
    with pytest.raises(BadRequest, match="workers is 0"):
        LocalDynamo("tiny", 0, python=stand_in)


def test_a_part_of_a_deployment_needs_discovery(stand_in: Path) -> None:
    with pytest.raises(BadRequest, match="give --discovery too"):
        LocalDynamo("tiny", 1, python=stand_in, with_frontend=False)
    with pytest.raises(BadRequest, match="give --discovery and --advertise too"):
        LocalDynamo("tiny", 1, python=stand_in, host="0.0.0.0")


async def test_an_unreachable_etcd_is_an_error_before_anything_starts(
    stand_in: Path, tmp_path: Path
) -> None:
    network = {"DYN_DISCOVERY_BACKEND": "etcd", "ETCD_ENDPOINTS": "http://127.0.0.1:9"}
    with pytest.raises(Unavailable, match=r"etcd cannot be reached.*127\.0\.0\.1:9: "):
        async with LocalDynamo("tiny", 1, python=stand_in, network=network):
            pass
    assert not (tmp_path / "log").exists()
