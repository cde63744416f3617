"""Three real workers behind fault injectors, and the scores of each checkpoint."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lockstep.backends.admin_client import CallBudget as Call
from lockstep.backends.admin_client import CallBudgets
from lockstep.backends.lockstep.admin import LockstepAdmin
from lockstep.checkpoint.manifest import PROBE
from lockstep.checkpoint.probe import Probe
from lockstep.engine import EngineOptions
from lockstep.engine.core import Core
from lockstep.fleet.fan_out import PhaseBudgets
from lockstep.fleet.fleet import Fleet
from lockstep.fleet.routing.pool import Pool
from lockstep.models import bundled
from tests.engine import checkpoints
from tests.fleet.fakes import until
from tests.fleet.fault_injector import Injector
from tests.processes import TOKEN, WorkerProcess

SEQUENCES = ((5, 6, 7, 8, 9, 10, 11, 12), (100, 3, 77, 41, 9))
ARGUMENTS = ("--max-model-len", "512", "--max-num-seqs", "16")
FIRST = "default"
NEAR = 1e-4
"""Checkpoints are 0.1 apart, and close arithmetic 4e-6 from exact: this tells them on any CPU."""
BUDGET = PhaseBudgets(stage=4.0, pause=2.0, commit=4.0, prove=4.0, resume=2.0)
CALL = Call(1.0, 2.0, tries=2)
CALLS = CallBudgets(quick=CALL, pause=CALL, load=Call(4.0, 4.0), commit=CALL, probe=CALL)


@dataclass
class Checkpoints:
    """Directories by label, and their logprobs of SEQUENCES."""

    paths: dict[str, Path]
    scores: dict[str, list[list[float]]]

    @classmethod
    def make(cls, directory: Path) -> Checkpoints:
        """`default` is what workers start with; a and b have a probe, c has none; x is broken."""
        torch.set_num_threads(1)
        source = bundled("tiny")
        assert source is not None
        core = Core(source, EngineOptions(max_model_len=512, max_seqs=1))
        paths, scores = {FIRST: source}, {}
        for seed, name in enumerate("abcx", start=1):
            paths[name] = checkpoints.variant(source, directory / name, seed=seed, scale=1e-2)
        for name, path in paths.items():
            weights = core.served.load_weights(path, name)
            scores[name] = [core.score(list(ids), weights=weights) for ids in SEQUENCES]
            if name in "ab":
                rows = tuple(tuple(row) for row in scores[name])
                Probe(SEQUENCES, rows, NEAR).write(path / PROBE)
        return cls(paths, scores)

    def held(self, scores: list[list[float]]) -> str | None:
        """The label of the only checkpoint that scores like this."""
        labels = [name for name, known in self.scores.items() if _near(known, scores)]
        return labels[0] if len(labels) == 1 else None


@dataclass
class Workers:
    """Real processes, kept for many tests; killed ones are replaced."""

    processes: list[WorkerProcess] = field(default_factory=list)

    def start(self, count: int) -> None:
        while len(self.processes) < count:
            self.processes.append(WorkerProcess(*ARGUMENTS))

    def restart(self, index: int) -> WorkerProcess:
        """The same ports, another process."""
        old = self.processes[index]
        old.stop(9)
        ports = [url.rpartition(":")[2] for url in (old.url, old.system_url)]
        self.processes[index] = WorkerProcess(
            *ARGUMENTS, "--port", ports[0], "--system-port", ports[1]
        )
        return self.processes[index]

    async def reset(self, first: Path) -> None:
        """All as if they had just been started."""
        for index, worker in enumerate(self.processes):
            if worker.process.poll() is not None:
                worker = self.restart(index)
            await worker.control("resume_generation")
            _, view = await worker.control("liveness_probe")
            for name in view["adapter_labels"]:
                await worker.control("unload_lora_adapter", lora_name=name)
            if view["staged"] is not None:
                await worker.control("rollback")
            await worker.control(
                "update_weights_from_disk", model_path=str(first), weight_version=FIRST
            )
            await worker.control("flush_cache")


@contextmanager
def running(count: int) -> Iterator[Workers]:
    workers = Workers()
    try:
        workers.start(count)
        yield workers
    finally:
        for process in workers.processes:
            process.stop(9)


@dataclass
class Live:
    """A fleet over real workers, each behind an injector."""

    fleet: Fleet
    pool: Pool
    injectors: list[Injector]
    workers: Workers
    checkpoints: Checkpoints

    async def add(self, index: int) -> None:
        injector = self.injectors[index]
        admin = LockstepAdmin(injector.system_url, TOKEN, budgets=CALLS, backoff=0.02)
        await self.fleet.add(injector.url, admin, worker_id=f"w{index}")

    async def update(self, name: str, **options: Any) -> Any:
        path = str(self.checkpoints.paths[name])
        return await self.fleet.update_weights(path, version=name, **options)

    def serving(self) -> list[int]:
        return [int(one.id[1:]) for one in self.pool.workers if one.state == "serving"]

    async def check(self) -> str:
        """All that serve hold one checkpoint, by their scores, and it is the one on the label."""
        label = self.fleet.desired.version
        assert label is not None
        for index in self.serving():
            worker = self.workers.processes[index]
            status, body = await worker.control("probe", token_ids=[list(s) for s in SEQUENCES])
            assert status == 200, body
            assert (index, self.checkpoints.held(body["logprobs"])) == (index, label)
            assert body["version"] == label
            _, view = await worker.control("liveness_probe")
            paused = self.fleet.desired.paused is not None
            assert (index, view["state"] != "running") == (index, paused)
            labels = {name: spec.label for name, spec in self.fleet.desired.adapters.items()}
            assert view["adapter_labels"] == labels
        return label

    async def healed(self) -> str:
        """Without faults all come back to what was agreed on, by themselves."""
        for injector in self.injectors:
            injector.heal()
        for index, worker in enumerate(self.workers.processes[: len(self.injectors)]):
            if worker.process.poll() is not None:
                self.injectors[index].worker = self.workers.restart(index)
        for one in self.pool.workers:
            self.pool.check(one.id)
        await until(lambda: len(self.serving()) == len(self.pool.workers), 30)
        return await self.check()


@asynccontextmanager
async def live(
    workers: Workers,
    checkpoints: Checkpoints,
    *,
    count: int = 3,
    joined: int | None = None,
    reset: bool = True,
    **options: Any,
) -> AsyncIterator[Live]:
    """A fleet of `count` workers, of which the first `joined` are in it."""
    if reset:
        await workers.reset(checkpoints.paths[FIRST])
    async with AsyncExitStack() as stack:
        injectors = [
            await stack.enter_async_context(Injector(process))
            for process in workers.processes[:count]
        ]
        pool = await stack.enter_async_context(Pool(probe_seconds=0.2))
        fleet = await stack.enter_async_context(
            Fleet(
                pool,
                options.pop("store", None),
                budget=options.pop("budget", BUDGET),
                **options,
            )
        )
        made = Live(fleet, pool, injectors, workers, checkpoints)
        for index in range(count if joined is None else joined):
            await made.add(index)
        yield made


def _near(one: list[list[float]], other: list[list[float]]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(abs(a - b) < NEAR for x, y in pairs for a, b in zip(x, y, strict=True))
