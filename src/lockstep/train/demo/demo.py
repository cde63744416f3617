"""The demo: a gateway, two workers and a trainer; one worker is killed midway and comes back."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shlex
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console

from lockstep.client.policy import connect
from lockstep.fleet.remote import RemoteFleet
from lockstep.run_record import EVENTS, Row, Run, Summary
from lockstep.settings import PREFIX
from lockstep.tokens.errors import EngineFailure
from lockstep.tokens.versions import VersionLabel
from lockstep.train.config import (
    EnvConfig,
    EvalConfig,
    LearnerConfig,
    LoopConfig,
    RolloutConfig,
    TrainConfig,
)
from lockstep.train.demo.report_page import write_report
from lockstep.train.demo.view import RunView
from lockstep.train.loop import Trainer
from lockstep.train.records.metrics import StepMetrics
from lockstep.train.records.run_dir import RunDirectory
from lockstep.train.retry import PASSING

Task = Literal["calc", "reverse", "guess"]

WORKERS = 2
START_SECONDS = 120.0
BACK_SECONDS = 60.0
STOP_SECONDS = 45.0
TAIL_SECONDS = 0.2
LORA_RANK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """The options of a demo. `run_dir` holds no run yet; the report goes there by default."""

    run_dir: Path
    task: Task = "calc"
    moe: bool = False
    lora: bool = False
    seed: int = 1
    steps: int = 32
    groups: int = 16
    group_size: int = 8
    eval_prompts: int = 128
    exact: bool = False
    """Demands that trainer and workers compute the same bits."""
    worker_args: tuple[str, ...] = ()
    report: Path | None = None

    @property
    def model(self) -> str:
        return "tiny-moe" if self.moe else "tiny"

    @property
    def config(self) -> TrainConfig:
        """The run. Learning all weights and learning an adapter want different rates."""
        return TrainConfig(
            model=self.model,
            run_dir=str(self.run_dir),
            seed=self.seed,
            env=EnvConfig(name=self.task),
            rollout=RolloutConfig(
                groups=self.groups,
                group_size=self.group_size,
                experts=self.moe,
                samples_shown=6,
            ),
            learner=LearnerConfig(
                lr=1e-3 if self.lora else 1e-4,
                lora_rank=LORA_RANK if self.lora else 0,
                exact=self.exact or None,
            ),
            loop=LoopConfig(steps=self.steps),
            eval=EvalConfig(prompts=self.eval_prompts),
        )


@dataclass(frozen=True, slots=True)
class DemoGateway:
    """A `lockstep serve` of this demo's own."""

    url: str
    admin_url: str
    token: str
    workers: list[Row]


async def run_demo(demo: Demo, console: Console) -> tuple[Summary, Path]:
    """Trains, and returns the summary and the path of the report.

    Raises Conflict for a directory that holds a run already, and EngineFailure when the fleet
    does not start or does not come back.
    """
    config = demo.config  # both before anything is started
    RunDirectory(demo.run_dir).start()
    kinds = " with a LoRA adapter" if demo.lora else ""
    title = f"Lockstep demo: {demo.task} on {demo.model}{kinds}, {WORKERS} workers"
    with RunView(console, title, demo.steps) as view:
        view.phase(f"starting a gateway and {WORKERS} workers")
        async with serving(demo) as served:
            victim = Victim(demo, served.workers[-1])
            tail = EventTail(demo.run_dir / EVENTS, view)
            following = asyncio.create_task(tail.follow())
            trainer = Trainer(
                config,
                policy_url=served.url,
                admin_url=served.admin_url,
                admin_token=served.token,
            )

            def on_step(step: StepMetrics) -> None:
                view.step(step.to_json())
                if step.step == demo.steps:
                    view.phase("scoring held-out prompts")
                victim.after(step)

            try:
                view.phase("scoring held-out prompts")
                result = await trainer.run(on_step=on_step)
                view.phase("waiting until all workers agree")
                await victim.dead()
                versions = await _agreed(demo, served, result.version)
            finally:
                victim.spare()
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
                tail.read()
            view.phase("done")
    RunDirectory(demo.run_dir).write_run(versions=versions)
    report = write_report(demo.run_dir, demo.report)
    return Run.read(demo.run_dir).summary(), report


class Victim:
    """The worker that is killed in the middle of the run, while it generates."""

    def __init__(self, demo: Demo, worker: Row) -> None:
        self._demo = demo
        self._worker = worker
        self._step = max(1, demo.steps // 2)
        self._task: asyncio.Task[None] | None = None

    def after(self, step: StepMetrics) -> None:
        """Called after each step; after the right one, its end is near."""
        if step.step == self._step and self._task is None:
            self._task = asyncio.create_task(self._kill(step.time_rollout / 2))

    async def dead(self) -> None:
        """Returns when it was killed; at once if its time did not come."""
        if self._task is not None:
            await self._task

    def spare(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _kill(self, delay: float) -> None:
        await asyncio.sleep(delay)
        pid = int(self._worker["pid"])
        os.kill(pid, signal.SIGKILL)
        RunDirectory(self._demo.run_dir).event("worker_killed", worker=self._worker["id"], pid=pid)


@asynccontextmanager
async def serving(demo: Demo) -> AsyncIterator[DemoGateway]:
    """`lockstep serve`, as anybody would start it, while the block runs; its log is in the run."""
    log = demo.run_dir / "serve.log"
    token = secrets.token_urlsafe(32)
    environ = {key: value for key, value in os.environ.items() if not key.startswith(PREFIX)}
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            # ends with this process: a demo that is killed leaves nothing behind
            sys.executable, "-P", "-m", "lockstep.cli.parent_death", str(os.getpid()),
            "serve", demo.model, "--workers", str(WORKERS), "--json",
            "--port", "0", "--admin-port", "0", "--sessions", "memory",
            "--checkpoint-root", str(demo.run_dir.absolute()),
            "--worker-args", shlex.join(demo.worker_args),
            stdin=asyncio.subprocess.DEVNULL, stdout=PIPE, stderr=errors,
            env={**environ, PREFIX + "ADMIN_TOKEN": token},
            start_new_session=True,  # Ctrl-C is for this process, which then stops that one
        )  # fmt: skip
    try:
        ready = await _ready(process, log)
        yield DemoGateway(ready["url"], ready["admin_url"], token, ready["workers"])
    finally:
        await _stop(process)


async def _ready(process: Process, log: Path) -> Row:
    if process.stdout is None:
        raise EngineFailure("the output of lockstep serve cannot be read")
    try:
        async with asyncio.timeout(START_SECONDS):
            line = await process.stdout.readline()
    except TimeoutError:
        raise EngineFailure(
            f"lockstep serve was not ready after {START_SECONDS:g} s: see {log}"
        ) from None
    if not line:
        with suppress(TimeoutError):  # it has closed its output and is about to end
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()
        raise EngineFailure(f"lockstep serve ended before it was ready: {_last_lines(log)} ({log})")
    ready: Row = json.loads(line)
    return ready


async def _stop(process: Process) -> None:
    """SIGTERM, and SIGKILL for a gateway that does not end; its workers end with it."""
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def _agreed(demo: Demo, served: DemoGateway, last: str) -> dict[str, str]:
    """What each worker itself says it serves, when that is the `last` version for all of them.

    Raises EngineFailure if it never is. The trainer writes down who comes back while it runs; after
    that it is written here.
    """
    versions: dict[str, str | None] = _away(demo.run_dir)
    async with RemoteFleet(served.admin_url, token=served.token) as fleet:
        with suppress(TimeoutError):
            async with asyncio.timeout(BACK_SECONDS):
                while True:
                    for row in (await fleet.state())["workers"]:
                        worker, was_away = row["id"], versions.get(row["id"], "") is None
                        version = await _version(demo, row) if row["state"] == "serving" else None
                        if was_away and version is not None:
                            RunDirectory(demo.run_dir).event(
                                "worker_back", worker=worker, version=version
                            )
                        versions[worker] = version
                    known = {worker: each for worker, each in versions.items() if each is not None}
                    right = [each for each in known.values() if _is_of(each, last)]
                    if right and len(right) == len(versions):
                        return known
                    await asyncio.sleep(TAIL_SECONDS)
    raise EngineFailure(f"not all workers served {last!r} within {BACK_SECONDS:g} s: {versions}")


def _is_of(label: str, version: str) -> bool:
    """Whether tokens under `label` come from that version, of the weights or of the adapter."""
    parts = VersionLabel.parse(label)
    # An adapter's contents are named by their version and a digest after it.
    return label == version or (parts.contents or "").rpartition(".")[0] == version


def _away(run_dir: Path) -> dict[str, str | None]:
    """The workers that were lost and, as far as is written down, not back yet."""
    last: dict[str, str] = {}
    for line in (run_dir / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["kind"] in ("worker_killed", "worker_lost", "worker_back"):
            last[str(event["worker"])] = event["kind"]
    return {worker: None for worker, kind in last.items() if kind != "worker_back"}


async def _version(demo: Demo, row: Row) -> str | None:
    """The weights that a worker serves, or the adapter on them; None when it does not say."""
    with suppress(*PASSING):
        async with connect(row["url"], tokenizer=demo.model, retries=0) as policy:
            for card in await policy.models():
                if (card.parent is not None) == demo.lora:
                    return card.weight_version
    return None


class EventTail:
    """Shows what happens besides the steps, whoever writes it down."""

    def __init__(self, path: Path, view: RunView) -> None:
        self._path = path
        self._view = view
        self._seen = 0

    async def follow(self) -> None:
        while True:
            self.read()
            await asyncio.sleep(TAIL_SECONDS)

    def read(self) -> None:
        """Shows what is new."""
        if not self._path.exists():
            return
        with open(self._path, "rb") as file:
            file.seek(self._seen)
            lines = [line for line in file if line.endswith(b"\n")]
        self._seen += sum(map(len, lines))
        for event in map(json.loads, lines):
            if event["kind"].startswith("worker_") or event["kind"] in ("numerics", "skipped"):
                self._view.event(event)


def _last_lines(log: Path, count: int = 3) -> str:
    return " ".join(log.read_text("utf-8", "replace").strip().splitlines()[-count:])
