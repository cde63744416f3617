"""The state machine of a worker: allowed changes, and that only proved workers are routed."""

from __future__ import annotations

import asyncio
import tempfile
from itertools import product
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.fleet.routing.affinity import Affinity
from lockstep.fleet.worker import TRANSITIONS, State, Worker
from lockstep.http.client.client import HttpClient
from lockstep.tokens.errors import Conflict, LockstepError, NotFound, Unavailable
from tests.simulator.fleet import Simulation, simulated

STATES: tuple[State, ...] = get_args(State)
WAYS: dict[State, tuple[State, ...]] = {
    "joining": (),
    "down": ("down",),
    "syncing": ("syncing",),
    "proving": ("syncing", "proving"),
    "serving": ("syncing", "proving", "serving"),
    "draining": ("draining",),
    "quarantined": ("down", "quarantined"),
}
"""How a new worker comes to each state."""


def worker_in(state: State) -> Worker:
    worker = Worker("w0", "http://w0", HttpClient("http://w0"))
    for step in WAYS[state]:
        worker.become(step, f"on its way to {state}")
    return worker


@pytest.mark.parametrize(("before", "after"), list(product(STATES, STATES)))
def test_a_worker_changes_its_state_only_as_the_table_allows(before: State, after: State) -> None:
    worker = worker_in(before)
    if after == before or after in TRANSITIONS[before]:
        worker.become(after, "because")
        assert (worker.state, worker.reason) == (after, "because")
    else:
        reason = worker.reason
        with pytest.raises(Conflict, match=f"is {before} and cannot become {after}"):
            worker.become(after, "because")
        assert (worker.state, worker.reason) == (before, reason)


def test_only_a_proof_leads_to_service_and_nothing_leads_out_of_a_removal() -> None:
    assert [state for state in STATES if "serving" in TRANSITIONS[state]] == ["proving"]
    assert TRANSITIONS["draining"] == frozenset()
    assert TRANSITIONS.keys() == set(STATES)


def test_a_worker_that_stays_in_a_state_keeps_its_time() -> None:
    worker = worker_in("down")
    since = worker.since
    worker.become("down", "another reason")
    assert (worker.since, worker.reason) == (since, "another reason")


def test_the_state_cannot_be_set() -> None:
    with pytest.raises(AttributeError):
        worker_in("joining").state = "serving"  # type: ignore[misc]


@pytest.mark.failure_mode("F26")
async def test_a_held_worker_does_not_get_a_request_that_names_it(tmp_path: Path) -> None:
    """It runs weights that it has not proved yet, only to be able to prove them."""
    async with simulated(tmp_path) as fleet:
        worker = fleet.pool.get("w0")
        fleet.pool.hold(worker, True)

        async def call(_: Worker) -> None:
            raise AssertionError("it got a request")

        with pytest.raises(Unavailable, match="'w0', which is held back until"):
            await fleet.pool.run(Affinity(worker="w0"), call)
        fleet.pool.hold(worker, False)
        assert "w0" in fleet.serving()


@pytest.mark.failure_mode("F26")
@pytest.mark.parametrize("call", ["stage", "probe", "resume"])
async def test_a_worker_that_is_ejected_while_it_is_brought_up_does_not_serve(
    tmp_path: Path, call: str
) -> None:
    """For example after a restart: what it proved before that counts no more."""
    async with simulated(tmp_path) as fleet:
        await fleet.update("a")
        process = fleet.workers[0]
        process.start()
        fleet.pool.eject("w0", "it was restarted")
        process.strike(call, "delay")
        looking = asyncio.create_task(fleet.pool.look())
        while not process.struck:
            await asyncio.sleep(0)
        fleet.pool.eject("w0", "it was restarted again")
        await looking
        assert (fleet.pool.get("w0").state, fleet.serving()) == ("down", ["w1", "w2"])
        await fleet.pool.look()
        assert len(fleet.serving()) == 3
        fleet.check()


@pytest.mark.failure_mode("F26")
async def test_a_worker_that_is_down_when_an_update_starts_is_brought_up_after_it(
    tmp_path: Path,
) -> None:
    async with simulated(tmp_path) as fleet:
        fleet.pool.eject("w0", "a request failed on it")
        operation = await fleet.update("a")
        assert sorted(operation.workers) == ["w1", "w2"]
        assert fleet.state(fleet.workers[0]) == "down"
        await fleet.pool.look()
        assert sorted(fleet.serving()) == ["w0", "w1", "w2"]
        assert fleet.workers[0].version == "a"
        fleet.check()


EVENTS = ("kill", "restart", "forge", "strike", "fail", "eject", "quarantine", "hold", "release",
          "look", "update", "remove", "add")  # fmt: skip


@pytest.mark.failure_mode("F26")
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 2)), min_size=5, max_size=25))
def test_every_routed_worker_has_proved_the_fleets_version_after_any_events(
    events: list[tuple[str, int]],
) -> None:
    async def run(directory: Path) -> None:
        async with simulated(directory) as fleet:
            for number, (event, which) in enumerate(events):
                pending = asyncio.create_task(happen(fleet, event, which, number))
                while not pending.done():
                    await asyncio.sleep(0)
                    routed_are_proved(fleet)
                await pending
                routed_are_proved(fleet)

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(run(Path(directory)))


async def happen(fleet: Simulation, event: str, which: int, number: int) -> None:
    """Apply one event to a worker. Errors are ignored: the state that it leaves behind counts."""
    process, pool = fleet.workers[which], fleet.pool
    try:
        match event:
            case "kill":
                process.kill()
            case "restart":
                process.start()
            case "forge":  # it claims the right version and holds other weights
                process.start()
                process.version = fleet.fleet.desired.version or ""
                process.weights = "forged"
            case "strike":
                process.strike("probe", "corrupt")
            case "fail":

                async def call(_: Worker) -> None:
                    raise Unavailable("the connection broke")

                await pool.run(Affinity(worker=process.name), call)
            case "eject":
                pool.eject(process.name, "for the test")
            case "quarantine":
                fleet.fleet.state.quarantine(fleet.fleet.worker(process.name), "for the test")
            case "hold" | "release":
                pool.hold(pool.get(process.name), event == "hold")
            case "look":
                await pool.look()
            case "update":
                await fleet.update(f"v{number}")
            case "remove":
                await fleet.fleet.remove(process.name)
            case "add":
                await fleet.add(process)
    except (LockstepError, NotFound):
        return


def routed_are_proved(fleet: Simulation) -> None:
    for worker in fleet.pool.routed:
        if worker.hash_index < 0:
            continue
        assert worker.routable, f"{worker.id} is routed and {worker.state}, held: {worker.held}"
        assert worker.path[-3:] == ["syncing", "proving", "serving"]
        if worker.seen and not fleet.fleet.operations.running:
            assert worker.version == fleet.fleet.desired.version
            assert worker.process.weights == fleet.meaning[worker.process.version]
