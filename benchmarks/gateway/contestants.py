"""The gateways of the benchmark, each started as its users start it, on one core.

A contestant that takes no ids on vLLM's generate route gets the same tokens in its own way.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks import measure, peers
from benchmarks.gateway.traffic import CASES, PATHS, Dialect, ids_body
from lockstep.protocol.dynamo import environment as dynamo_env

START_SECONDS = 90.0
CORES = sorted(os.sched_getaffinity(0))
GATEWAY_CORE, OTHER_CORES = {CORES[-1]}, set(CORES[:-1]) or {CORES[-1]}
"""A gateway has a core of its own, away from clients and upstream."""


@dataclass(frozen=True, slots=True)
class Place:
    """What the contestants are started with."""

    stack: ExitStack
    directory: Path
    tokenizer: Path
    traffic: Path
    upstreams: Mapping[str, int]

    def upstream(self, owner: str) -> str:
        return f"http://127.0.0.1:{self.upstreams[owner]}"


@dataclass(frozen=True, slots=True)
class Server:
    """A gateway that runs."""

    port: int
    pid: int

    def cpu_seconds(self) -> float:
        return sum(measure.cpu_seconds(pid) for pid in measure.tree(self.pid))


def lockstep(place: Place, owner: str, *options: str, **environ: str) -> Server:
    """With its own defaults, sessions in a file among them, unless options say otherwise."""
    home = Path(tempfile.mkdtemp(prefix="lockstep-", dir=place.directory))
    command = [
        sys.executable, "-m", "lockstep", "gateway", "--worker", place.upstream(owner),
        "--tokenizer", str(place.tokenizer), "--port", "0", "--admin-port", "0", "--json",
        "--state-dir", str(home), *options,
    ]  # fmt: skip
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("LOCKSTEP_", "OTEL_"))}
    environ = {**clean, **environ}
    process = started(place, command, GATEWAY_CORE, cwd=home, env=environ, stdout=subprocess.PIPE)
    return Server(int(ready_line(process)["url"].rpartition(":")[2]), process.pid)


def vllm_router(place: Place, policy: str) -> Server:
    """Without a log line for each request, as the others have none."""
    port = free_port()
    command = [
        str(peers.python("vllm-router")), "-m", "vllm_router.launch_router",
        "--worker-urls", place.upstream("vllm"), "--host", "127.0.0.1", "--port", str(port),
        "--prometheus-port", str(free_port()), "--log-level", "warning",
        "--worker-startup-check-interval", "1", "--policy", policy,
    ]  # fmt: skip
    process = started(place, command, GATEWAY_CORE, cwd=place.directory, stdout=subprocess.DEVNULL)
    wait_for(process, f"http://127.0.0.1:{port}/v1/models")
    return Server(port, process.pid)


def rllm(place: Place, store: str) -> Server:
    port = free_port()
    command = [
        str(peers.python("rllm-model-gateway")), "-m", "rllm_model_gateway", "--host", "127.0.0.1",
        "--port", str(port), "--worker", f"{place.upstream('vllm')}/v1", "--log-level", "warning",
        "--db-path", str(place.directory / "rllm.sqlite"), "--store", store,
    ]  # fmt: skip
    process = started(place, command, GATEWAY_CORE, cwd=place.directory, stdout=subprocess.DEVNULL)
    wait_for(process, f"http://127.0.0.1:{port}/health")
    return Server(port, process.pid)


def dynamo(place: Place, store: str) -> Server:
    """A frontend, with a worker that finds it in a directory; only the frontend is measured."""
    python = str(peers.python("dynamo"))
    model = place.directory / "dynamo-model"
    shutil.copytree(place.tokenizer, model)
    if not (model / "config.json").exists():
        config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"],
                  "eos_token_id": 151_645, "max_position_embeddings": 40_960}  # fmt: skip
        (model / "config.json").write_text(json.dumps(config))
    clean = {k: v for k, v in os.environ.items() if not k.startswith("DYN_")}
    environ = dynamo_env.complete(clean, place.directory / store)
    port = free_port()
    frontend = started(
        place,
        [python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)],
        GATEWAY_CORE,
        cwd=place.directory,
        env={**environ, "DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE": "1", "DYN_LOG": "error"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    started(
        place,
        [python, "-m", "benchmarks.gateway.dynamo_worker", str(place.traffic), str(model)],
        OTHER_CORES,
        cwd=peers.ROOT,
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    case = next(iter(CASES.values()))
    wait_for(frontend, f"http://127.0.0.1:{port}{PATHS['nvext']}", ids_body("nvext", case, [1]))
    return Server(port, frontend.pid)


@dataclass(frozen=True, slots=True)
class Contestant:
    """A server with its setting, and how its requests are made: with ids, and in sessions."""

    start: Callable[[Place, str], Server]
    setting: str
    ids: Dialect = "generate"
    sessions: str = "header"


CONTESTANTS = {
    "lockstep": Contestant(lockstep, "vllm"),
    "lockstep-worker": Contestant(lockstep, "lockstep"),
    "vllm-router": Contestant(vllm_router, "cache_aware"),
    "dynamo": Contestant(dynamo, "store", ids="nvext"),
    "dynamo-generate": Contestant(dynamo, "store"),
    "rllm": Contestant(rllm, "sqlite", ids="completions", sessions="path"),
    "rllm-memory": Contestant(rllm, "memory", ids="completions", sessions="path"),
}
"""Lockstep's settings are what stands behind it: a plain vLLM server, or a Lockstep worker. The
router's policy is its default one."""


def start(place: Place, names: Iterable[str]) -> dict[str, Server]:
    """Those named, running; contestants that only differ in their requests share a server."""
    servers: dict[tuple[object, str], Server] = {}
    for name in names:
        one = CONTESTANTS[name]
        if (one.start, one.setting) not in servers:
            servers[one.start, one.setting] = one.start(place, one.setting)
    return {name: servers[CONTESTANTS[name].start, CONTESTANTS[name].setting] for name in names}


def started(
    place: Place, command: list[str], cores: set[int], **options: Any
) -> subprocess.Popen[str]:
    """A process on these cores, ended with the others."""
    return place.stack.enter_context(running(command, cores, **options))


@contextmanager
def running(command: list[str], cores: set[int], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """The process inherits its cores: runtimes that count them start as many threads."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        process = subprocess.Popen(command, text=True, **options)
    finally:
        os.sched_setaffinity(0, mine)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def ready_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The JSON line that a process prints once it is ready. Raises RuntimeError if it ended."""
    lines: IO[str] | None = process.stdout
    for line in lines or ():
        if line.startswith("{"):
            fields: dict[str, Any] = json.loads(line)
            return fields
    raise RuntimeError(f"{process.args!r} ended with code {process.wait()}")


def wait_for(process: subprocess.Popen[str], url: str, body: bytes | None = None) -> None:
    """Returns when `url` gives 200. Raises RuntimeError when the process ends or takes long."""
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    until = time.monotonic() + START_SECONDS
    last: object = None
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(request, timeout=5) as response:
                response.read()
                return
        except OSError as error:
            last = error
        time.sleep(0.1)
    raise RuntimeError(f"{process.args!r} is not ready, code {process.poll()}: {last!r}")


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port
