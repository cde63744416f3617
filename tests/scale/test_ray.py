"""Workers as Ray actors on two nodes: they join by themselves, are updated, and come back."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.faults.traffic import SEQUENCES, Reference
from tests.processes import TOKEN
from tests.scale.replicas import HEADERS, ReplicaProcess

ROOT = Path(__file__).parents[2]
KEY = "key-of-the-workers"


class RayCluster:
    """The driver of a fleet on a cluster of its own."""

    def __init__(self, gateway: ReplicaProcess, weights: Path, home: Path) -> None:
        self.process = subprocess.Popen(
            [ROOT / ".venv-scale/bin/python", ROOT / "tests/scale/ray_driver.py",
             gateway.admin_url, TOKEN, sys.executable, weights],
            cwd=home,
            env={"PATH": "/usr/bin:/bin", "HOME": str(home), "RAY_TMPDIR": str(home),
                 "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.views: list[dict[str, Any]] = self.read()["views"]

    def read(self) -> dict[str, Any]:
        while line := self.process.stdout.readline() if self.process.stdout else "":
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError(f"the driver ended with code {self.process.wait()}")

    async def order(self, do: str, **fields: Any) -> dict[str, Any]:
        response = await self.attempt(do, **fields)
        assert "error" not in response, response
        return response

    async def attempt(self, do: str, **fields: Any) -> dict[str, Any]:
        if self.process.stdin is None:
            raise RuntimeError("the driver has no input")
        self.process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self.process.stdin.flush()
        return await asyncio.to_thread(self.read)

    def stop(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(60)
        finally:
            self.process.kill()


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[ReplicaProcess]:
    process = ReplicaProcess(
        "--workers-join", "--state-dir", str(tmp_path / "state"), LOCKSTEP_WORKER_API_KEY=KEY
    )
    yield process
    process.kill(signal.SIGTERM)


@pytest.fixture
def cluster(gateway: ReplicaProcess, tmp_path: Path) -> Iterator[RayCluster]:
    home = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # short: Ray puts sockets below it
    cluster = RayCluster(gateway, tmp_path / "weights", home)
    try:
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(home, ignore_errors=True)


async def held(reference: Reference, view: dict[str, Any]) -> str | None:
    """The version whose weights that worker has, by what it scores."""
    url = f"{view['admin_url']}/engine/probe"
    body = {"token_ids": [list(ids) for ids in SEQUENCES]}
    async with aiohttp.ClientSession(headers=HEADERS) as http:
        async with http.post(url, json=body) as answer:
            return reference.held((await answer.json())["logprobs"])


@pytest.mark.timeout(180)
async def test_both_nodes_serve_and_a_killed_actor_comes_back_proved(
    gateway: ReplicaProcess, cluster: RayCluster, tmp_path: Path
) -> None:
    reference = await asyncio.to_thread(Reference, tmp_path / "trained")
    await cluster.order("serving")
    assert len({view["node"] for view in cluster.views}) == 2, "one worker on each node"
    served = set()
    for first in range(40):
        status, body = await gateway.generate([first + 5, *SEQUENCES[0][:4]])
        assert status == 200, body
    for view in cluster.views:
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {KEY}"}) as http:
            async with http.get(f"{view['url']}/metrics") as answer:
                lines = (await answer.text()).splitlines()
        tokens = [line for line in lines if line.startswith("lockstep_worker_generated_tokens_t")]
        if tokens and float(tokens[0].split()[-1]) > 0:
            served.add(view["id"])
    assert served == {"ray-0", "ray-1"}

    done = await cluster.order("update", path=str(reference.paths["a"]), version="a")
    assert done["workers"] == {"ray-0": True, "ray-1": True}
    assert [await held(reference, view) for view in cluster.views] == ["a", "a"]
    kept = [path.name for path in (tmp_path / "weights").iterdir() if path.is_dir()]
    assert len(kept) == 1
    assert kept[0].startswith(reference.paths["a"].name)

    damaged = await cluster.attempt("damaged", path=str(reference.paths["b"]))
    assert "but 000000" in damaged["error"], "what arrives is not what was put"
    file = tmp_path / "weights" / kept[0] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    changed = await cluster.attempt("update", path=str(reference.paths["a"]), version="again")
    assert "delete the directory" in changed["error"], "what lies there is not what was put"

    # A node that has nothing of it gets what came through the object store.
    shutil.rmtree(reference.paths["a"])
    shutil.rmtree(tmp_path / "weights")
    killed = cluster.views[0]
    os.kill(killed["actor_pid"], signal.SIGKILL)
    views = (await cluster.order("views"))["views"]
    back = next(view for view in views if view["id"] == killed["id"])
    assert back["actor_pid"] != killed["actor_pid"]
    with pytest.raises(ProcessLookupError):
        os.kill(killed["pid"], 0)  # its worker ended with it
    await cluster.order("serving")
    assert await held(reference, back) == "a"
    state = await gateway.state()
    assert {row["id"]: (row["state"], row["version"]) for row in state["workers"]} == {
        "ray-0": ("serving", "a"), "ray-1": ("serving", "a"),
    }  # fmt: skip

    os.kill(back["pid"], signal.SIGKILL)  # the worker, not the actor
    async with asyncio.timeout(60):
        while back["pid"] in [v["pid"] for v in (await cluster.order("views"))["views"]]:
            await asyncio.sleep(0.2)
    await cluster.order("serving")
