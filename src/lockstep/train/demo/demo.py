"""The demo: a gateway, two workers and a trainer; one worker is killed midway and restarts."""

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

from rich.console import Console

from lockstep.client.policy import connect
from lockstep.fleet.remote import RemoteFleet
from lockstep.run_record import EVENTS, Row, Run, Summary
from lockstep.settings import PREFIX
from lockstep.tokens.errors import EngineFailure
from lockstep.tokens.versions import VersionLabel
from lockstep.train.demo.options import Demo
from lockstep.train.demo.report_page import write_report
from lockstep.train.demo.view import RunView
from lockstep.train.loop import Trainer
from lockstep.train.records.run_dir import RunDirectory
from lockstep.train.records.step_metrics import StepMetrics
from lockstep.train.retry import TRANSIENT

WORKERS = 2
START_SECONDS = 120.0
BACK_SECONDS = 60.0
STOP_SECONDS = 45.0
TAIL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class DemoGateway:
    """The `lockstep serve` process of the demo."""

    url: str
    admin_url: str
    token: str
    workers: list[Row]


async def run_demo(demo: Demo, console: Console) -> tuple[Summary, Path]:
    """Run the demo and return the summary and the path of the report.

    Raises Conflict for a directory that already holds a run, and EngineFailure when the fleet does
    not start or the killed worker does not return.
    """
    config = demo.config  # checked, as the directory is, before anything is started
    RunDirectory(demo.run_dir).start()
    kinds = " with a LoRA adapter" if demo.lora else ""
    title = f"Lockstep demo: {demo.task} on {demo.model}{kinds}, {WORKERS} workers"
    with RunView(console, title, demo.steps) as view:
        view.phase(f"starting a gateway and {WORKERS} workers")
        async with serve(demo) as gateway:
            victim = Victim(demo, gateway.workers[-1])
            tail = EventTail(demo.run_dir / EVENTS, view)
            following = asyncio.create_task(tail.follow())
            trainer = Trainer(
                config,
                policy_url=gateway.url,
                admin_url=gateway.admin_url,
                admin_token=gateway.token,
            )

            def on_step(step: StepMetrics) -> None:
                view.step(step.to_json())
                if step.step == demo.steps:
                    view.phase("scoring held-out prompts")
                victim.after(step)

            try:
                view.phase("scoring held-out prompts")
                result = await trainer.run(on_step=on_step)
                view.phase("waiting until all workers serve the last version")
                await victim.wait_killed()
                versions = await _wait_agreed(demo, gateway, result.version)
            finally:
                victim.cancel()
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
        """Schedule the kill after the middle step, to happen during its next rollouts."""
        if step.step == self._step and self._task is None:
            self._task = asyncio.create_task(self._kill(step.time_rollout / 2))

    async def wait_killed(self) -> None:
        """Wait until the worker was killed, if the kill is scheduled."""
        if self._task is not None:
            await self._task

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _kill(self, delay: float) -> None:
        await asyncio.sleep(delay)
        pid = int(self._worker["pid"])
        os.kill(pid, signal.SIGKILL)
        RunDirectory(self._demo.run_dir).event("worker_killed", worker=self._worker["id"], pid=pid)


@asynccontextmanager
async def serve(demo: Demo) -> AsyncIterator[DemoGateway]:
    """Run `lockstep serve` within the block; its log is in the run directory."""
    log = demo.run_dir / "serve.log"
    token = secrets.token_urlsafe(32)
    environ = {key: value for key, value in os.environ.items() if not key.startswith(PREFIX)}
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            # ends with this process, even if the demo is killed
            sys.executable, "-P", "-m", "lockstep.cli.parent_death", str(os.getpid()),
            "serve", demo.model, "--workers", str(WORKERS), "--json",
            "--port", "0", "--admin-port", "0", "--sessions", "memory",
            "--checkpoint-root", str(demo.run_dir.absolute()),
            "--worker-args", shlex.join(demo.worker_args),
            stdin=asyncio.subprocess.DEVNULL, stdout=PIPE, stderr=errors,
            env={**environ, PREFIX + "ADMIN_TOKEN": token},
            start_new_session=True,  # Ctrl-C reaches only this process, which then stops that one
        )  # fmt: skip
    try:
        ready = await _wait_ready(process, log)
        yield DemoGateway(ready["url"], ready["admin_url"], token, ready["workers"])
    finally:
        await _stop(process)


async def _wait_ready(process: Process, log: Path) -> Row:
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
        with suppress(TimeoutError):  # it has closed its output and is about to exit
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()
        raise EngineFailure(f"lockstep serve ended before it was ready: {_last_lines(log)} ({log})")
    ready: Row = json.loads(line)
    return ready


async def _stop(process: Process) -> None:
    """Terminate the gateway, and kill it after STOP_SECONDS. Its workers end with it."""
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def _wait_agreed(demo: Demo, gateway: DemoGateway, last: str) -> dict[str, str]:
    """Wait until every worker reports that it serves version `last`; return these reports.

    Raises EngineFailure after BACK_SECONDS. During the run the trainer records workers that return;
    afterwards they are recorded here.
    """
    versions: dict[str, str | None] = _lost_workers(demo.run_dir)
    async with RemoteFleet(gateway.admin_url, token=gateway.token) as fleet:
        with suppress(TimeoutError):
            async with asyncio.timeout(BACK_SECONDS):
                while True:
                    for row in (await fleet.state())["workers"]:
                        worker, was_lost = row["id"], versions.get(row["id"], "") is None
                        version = await _version(demo, row) if row["state"] == "serving" else None
                        if was_lost and version is not None:
                            RunDirectory(demo.run_dir).event(
                                "worker_back", worker=worker, version=version
                            )
                        versions[worker] = version
                    served = {name: own for name, own in versions.items() if own is not None}
                    newest = [label for label in served.values() if _is_of(label, last)]
                    if newest and len(newest) == len(versions):
                        return served
                    await asyncio.sleep(TAIL_SECONDS)
    raise EngineFailure(f"not all workers served {last!r} within {BACK_SECONDS:g} s: {versions}")


def _is_of(label: str, version: str) -> bool:
    """Whether `label` is that version of the weights or of the adapter."""
    parts = VersionLabel.parse(label)
    # The label of an adapter has its version, followed by a digest.
    return label == version or (parts.contents or "").rpartition(".")[0] == version


def _lost_workers(run_dir: Path) -> dict[str, str | None]:
    """Return the workers that were lost and have not returned, according to the events."""
    last: dict[str, str] = {}
    for line in (run_dir / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["kind"] in ("worker_killed", "worker_lost", "worker_back"):
            last[str(event["worker"])] = event["kind"]
    return {worker: None for worker, kind in last.items() if kind != "worker_back"}


async def _version(demo: Demo, row: Row) -> str | None:
    """Return the version of the weights or the adapter that a worker serves, or None."""
    with suppress(*TRANSIENT):
        async with connect(row["url"], tokenizer=demo.model, retries=0) as policy:
            for card in await policy.models():
                if (card.parent is not None) == demo.lora:
                    return card.weight_version
    return None


class EventTail:
    """Shows the events of a run, read from its file."""

    def __init__(self, path: Path, view: RunView) -> None:
        self._path = path
        self._view = view
        self._seen = 0

    async def follow(self) -> None:
        while True:
            self.read()
            await asyncio.sleep(TAIL_SECONDS)

    def read(self) -> None:
        """Show new events."""
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
