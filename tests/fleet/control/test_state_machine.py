"""Any order of joins, crashes, updates, retries, pauses and adapters never serves a mixture."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lockstep.fleet.fan_out import PhaseBudgets
from lockstep.storage.sqlite.control import SqliteControlStore
from lockstep.tokens.errors import LockstepError
from tests.simulator.fleet import Simulation, simulated
from tests.simulator.workers import Kind, SimulatedWorker, write_adapter

T = TypeVar("T")
BUDGET = PhaseBudgets(stage=0.05, pause=0.05, commit=0.05, prove=0.05, resume=0.05)
METHODS = ["view", "stage", "commit", "rollback", "probe", "probe staged", "pause", "resume",
           "load", "unload"]  # fmt: skip
KINDS: list[Kind] = ["drop", "swallow", "late", "hang", "hang after", "error", "null", "corrupt",
                     "kill", "kill after", "restart", "restart after", "restart before",
                     "restage"]  # fmt: skip
workers = st.integers(0, 4)


class FleetMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory()
        self.directory = Path(self.folder.name)
        self.started = 0
        self.label = 0
        self.versions: dict[str, str] = {}
        self.applied: dict[str, str] = {}
        self.open()

    def open(self) -> None:
        store = SqliteControlStore(str(self.directory / "state.sqlite"))
        self.opened = simulated(self.directory, 0, store=store, budget=BUDGET)
        self.sim: Simulation = self.run(self.opened.__aenter__())

    def teardown(self) -> None:
        self.run(self.opened.__aexit__(None, None, None))
        self.loop.close()
        self.folder.cleanup()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def attempt(self, work: Coroutine[Any, Any, T]) -> T | None:
        """An operation may fail; what counts is what it leaves behind."""
        try:
            return self.run(work)
        except LockstepError:
            return None

    @initialize()
    def begin(self) -> None:
        for _ in range(3):
            self.join()

    # Workers

    @rule()
    def join(self) -> None:
        if len(self.sim.workers) < 5:
            worker = SimulatedWorker(f"w{self.started}", self.sim.meaning["default"])
            self.started += 1
            self.sim.workers.append(worker)
            self.run(self.sim.add(worker))

    @rule(which=workers)
    def leave(self, which: int) -> None:
        if which < len(self.sim.workers) > 1:
            self.run(self.sim.fleet.remove(self.sim.workers.pop(which).name))

    @rule(which=workers)
    def crash(self, which: int) -> None:
        if which < len(self.sim.workers):
            self.sim.workers[which].kill()

    @rule(which=workers)
    def restart(self, which: int) -> None:
        if which < len(self.sim.workers):
            self.sim.workers[which].start()

    @rule(which=workers, method=st.sampled_from(METHODS), kind=st.sampled_from(KINDS),
          number=st.integers(1, 3))  # fmt: skip
    def strike(self, which: int, method: str, kind: Kind, number: int) -> None:
        if which < len(self.sim.workers):
            self.sim.workers[which].strike(method, kind, number)

    @rule()
    def look(self) -> None:
        self.run(self.sim.pool.look())

    # Operations

    @rule(mode=st.sampled_from(["keep", "wait", "abort"]))
    def update(self, mode: Any) -> None:
        self.label += 1
        version = f"v{self.label}"
        self.versions[f"key of {version}"] = version
        self.again(version, mode)

    @precondition(lambda self: self.versions)
    @rule(data=st.data(), mode=st.just("keep"))
    def retry(self, data: st.DataObject, mode: Any) -> None:
        self.again(data.draw(st.sampled_from(sorted(self.versions.values()))), mode)

    def again(self, version: str, mode: Any) -> None:
        commits = [worker.calls["commit"] for worker in self.sim.workers]
        operation = self.attempt(self.sim.update(version, mode=mode, key=f"key of {version}"))
        if operation is not None and version in self.applied:
            assert operation.id == self.applied[version]
            assert commits == [worker.calls["commit"] for worker in self.sim.workers]
        elif operation is not None:
            self.applied[version] = operation.id
            assert self.sim.fleet.desired.version == version

    @rule(mode=st.sampled_from(["keep", "wait", "abort"]))
    def pause(self, mode: Any) -> None:
        self.attempt(self.sim.fleet.pause(mode))

    @rule()
    def resume(self) -> None:
        self.attempt(self.sim.fleet.resume())

    @rule(name=st.sampled_from("xy"), seed=st.integers(100, 103))
    def load_adapter(self, name: str, seed: int) -> None:
        path = write_adapter(self.directory / f"adapter-{seed}", seed)
        self.attempt(self.sim.fleet.load_adapter(name, str(path)))

    @rule(name=st.sampled_from("xy"))
    def unload_adapter(self, name: str) -> None:
        self.attempt(self.sim.fleet.unload_adapter(name))

    @rule()
    def restart_gateway(self) -> None:
        """The workers live on; what is desired is read from the file."""
        workers, meaning = self.sim.workers, self.sim.meaning
        self.run(self.opened.__aexit__(None, None, None))
        self.open()
        self.sim.workers, self.sim.meaning = workers, meaning
        for worker in workers:
            self.run(self.sim.add(worker))

    # What must hold

    @invariant()
    def no_worker_lies_about_its_weights(self) -> None:
        """Until the pool looks, one that was restarted may serve under its old, true label."""
        self.sim.check(settled=False)

    @invariant()
    def all_that_serve_hold_what_was_agreed_on(self) -> None:
        self.run(self.sim.pool.look())
        self.sim.check()

    @invariant()
    def who_is_well_comes_back(self) -> None:
        for worker in self.sim.workers:
            worker.fault = None
            if not worker.alive:
                return
        for _ in range(2):
            self.run(self.sim.pool.look())
        assert len(self.sim.serving()) == len(self.sim.workers)


TestFleetMachine = FleetMachine.TestCase
TestFleetMachine.settings = settings(
    max_examples=20,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
