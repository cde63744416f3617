"""The leader is killed in each phase of an update: the next one finishes or undoes it, and the
gateways that are left lose no request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Literal

import pytest

from tests.faults.traffic import FIRST, SEQUENCES, Completed, Reference, Traffic
from tests.fleet.fault_injector import Injector
from tests.fleet.live_fleet import Workers, running
from tests.scale.replicas import ReplicaProcess, leader_of

FAILOVER_SECONDS = 5.0


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with running(2) as workers:
        yield workers


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("checkpoints"))


@dataclass
class Replicated:
    """Gateways on one store, whose calls to the workers go through injectors."""

    gateways: list[ReplicaProcess]
    injectors: list[Injector]
    workers: Workers
    reference: Reference
    failed: list[Any] = field(default_factory=list)

    async def leader(self) -> ReplicaProcess:
        """The leader, once there is one."""
        async with asyncio.timeout(60):
            while (leader := await leader_of(self.gateways)) is None:
                await asyncio.sleep(0.05)
        return leader

    async def followers(self) -> list[ReplicaProcess]:
        leader = await self.leader()
        return [each for each in self.gateways if each is not leader and each.alive]

    async def agreed(self) -> str:
        """The version on which all gateways and workers agree, the workers by their scores."""
        async with asyncio.timeout(60):
            while True:
                states = [await each.state() for each in self.gateways if each.alive]
                versions = {state["version"] for state in states}
                count = len(self.injectors)
                # A leader that was replaced reads the new version a moment after it follows.
                if len(versions) == 1 and all(state["serving"] == count for state in states):
                    break
                await asyncio.sleep(0.1)
        version = str(versions.pop())
        for worker in self.workers.processes:
            _, body = await worker.control("probe", token_ids=[list(ids) for ids in SEQUENCES])
            assert (self.reference.held(body["logprobs"]), body["version"]) == (version, version)
            _, view = await worker.control("liveness_probe")
            assert (view["state"], view["staged"]) == ("running", None)
        return version

    async def judge(self, answers: list[Completed]) -> None:
        """Every answer has the logprobs of the weights that it names."""
        wrong = [await asyncio.to_thread(self.reference.wrong, each) for each in answers]
        assert [why for why in wrong if why is not None] == []


@asynccontextmanager
async def replicated(
    workers: Workers, reference: Reference, store: str, count: int = 2
) -> AsyncIterator[Replicated]:
    """`count` gateways that are ready, of which one leads."""
    await workers.reset(reference.paths[FIRST])
    gateways: list[ReplicaProcess] = []
    async with AsyncExitStack() as stack:
        injectors = [
            await stack.enter_async_context(Injector(process)) for process in workers.processes
        ]
        named = [f"{each.url},{each.system_url}" for each in injectors]
        arguments = [part for each in named for part in ("--worker", each)]
        try:
            gateways += [ReplicaProcess(*arguments, store=store) for _ in range(count)]
            for gateway in gateways:
                await asyncio.to_thread(lambda gateway=gateway: gateway.ready)
            replicas = Replicated(gateways, injectors, workers, reference)
            await _announced(replicas)
            yield replicas
        finally:
            for gateway in gateways:
                gateway.process.kill()
                gateway.process.wait(10)


async def _announced(replicas: Replicated) -> None:
    """Every gateway knows every other one."""
    async with asyncio.timeout(60):
        while True:
            states = [await each.state() for each in replicas.gateways]
            if all(len(each["gateways"]) == len(states) and each["leader"] for each in states):
                return
            await asyncio.sleep(0.1)


async def test_gateways_that_follow_serve_what_the_leader_decided_and_hand_changes_on_to_it(
    workers: Workers, reference: Reference, store_url: str
) -> None:
    async with replicated(workers, reference, store_url, 3) as replicas:
        leader, followers = await replicas.leader(), await replicas.followers()
        assert len(followers) == 2
        states = [await each.state() for each in replicas.gateways]
        assert {state["leader"] for state in states} == {leader.admin_url}
        assert len({state["generation"] for state in states}) == 1
        assert sorted(state["role"] for state in states) == ["follower", "follower", "leader"]

        status, body = await followers[0].update(
            reference.paths["a"], "a", **{"Idempotency-Key": "k"}
        )
        assert (status, body["version"]) == (200, "a")
        again = await followers[1].update(reference.paths["a"], "a", **{"Idempotency-Key": "k"})
        assert again[1]["operation"]["id"] == body["operation"]["id"]
        for gateway in replicas.gateways:
            # At once after it was done, on whichever gateway.
            status, answer = await gateway.generate([5, 6, 7])
            assert (status, answer["choices"][0]["weight_versions"][-1]["version"]) == (200, "a")
            status, told = await gateway.admin("GET", f"operations/{body['operation']['id']}")
            assert (status, told["status"]) == (200, "done")
        # What fails at the leader fails alike here.
        wrong = [await each.update("/nowhere", "x") for each in (leader, followers[0])]
        assert wrong[0][0] == wrong[1][0] == 422, wrong
        assert wrong[0][1]["error"]["code"] == wrong[1][1]["error"]["code"]
        # Nobody hands on what was handed on: that could go round for ever.
        status, body = await followers[0].admin(
            "POST", "resume", {}, **{"X-Lockstep-Forwarded": "1"}
        )
        assert status == 503
        assert leader.admin_url in body["error"]["message"]
        # The last one to leave in order lets another lead at once.
        begun = monotonic()
        await asyncio.to_thread(leader.kill, 15)
        await replicas.leader()
        assert monotonic() - begun < FAILOVER_SECONDS
        assert await replicas.agreed() == "a"


PHASES: list[tuple[str, Literal["hook", "hook before"], set[str]]] = [
    ("stage", "hook before", {FIRST}),
    ("stage", "hook", {FIRST}),
    ("pause_generation", "hook before", {FIRST}),
    ("pause_generation", "hook", {FIRST}),
    ("commit", "hook before", {FIRST}),
    ("commit", "hook", {FIRST}),
    ("resume_generation", "hook before", {"a"}),
    ("resume_generation", "hook", {"a"}),
]


@pytest.mark.failure_mode("F74")
@pytest.mark.parametrize(("method", "when", "expected"), PHASES)
async def test_an_update_whose_leader_was_killed_is_finished_or_undone_and_no_request_is_lost(
    workers: Workers,
    reference: Reference,
    store_url: str,
    method: str,
    when: Literal["hook", "hook before"],
    expected: set[str],
) -> None:
    async with replicated(workers, reference, store_url) as replicas:
        leader, (survivor,) = await replicas.leader(), await replicas.followers()
        killed = asyncio.Event()
        died = 0.0

        async def kill() -> None:
            # The command that was under way still reaches the worker, and the others not.
            nonlocal died
            leader.kill()
            died = monotonic()
            killed.set()

        traffic = Traffic(survivor.url, "failover", agents=0)
        async with traffic:
            await asyncio.sleep(0.3)
            replicas.injectors[0].strike(method, when, hook=kill)
            update = asyncio.create_task(survivor.update(reference.paths["a"], "a"))
            async with asyncio.timeout(60):
                await killed.wait()
            status, body = await update
            assert status == 503, body
            assert leader.admin_url in body["error"]["message"]
            for injector in replicas.injectors:
                injector.heal()
            # A call that changes no pause: what was left paused must be let go by the new leader.
            while (await survivor.admin("POST", "flush_cache", {}))[0] != 200:
                assert monotonic() - died < FAILOVER_SECONDS
                await asyncio.sleep(0.05)
            version = await replicas.agreed()
            assert version in expected
            status, body = await survivor.update(reference.paths["b"], "b")
            assert status == 200, body
            assert await replicas.agreed() == "b"
        assert (traffic.refused, traffic.blamed) == (0, [])
        assert len(traffic.answers) > 10
        await replicas.judge(traffic.answers)
        assert {span.version for each in traffic.answers for span in each.versions} <= {
            FIRST, "a", "b"
        }  # fmt: skip


@pytest.mark.failure_mode("F62")
async def test_a_leader_that_was_asleep_cannot_write_or_command_when_it_wakes(
    workers: Workers, reference: Reference, store_url: str
) -> None:
    import signal

    async with replicated(workers, reference, store_url) as replicas:
        old, (new,) = await replicas.leader(), await replicas.followers()
        asleep = asyncio.Event()

        async def stop() -> None:
            old.kill(signal.SIGSTOP)
            asleep.set()

        # It sleeps with everything staged, about to pause and commit.
        replicas.injectors[0].strike("stage", "hook", hook=stop)
        update = asyncio.create_task(old.update(reference.paths["a"], "a"))
        await asleep.wait()
        async with asyncio.timeout(60):
            while (await new.state())["role"] != "leader":
                await asyncio.sleep(0.05)
        status, body = await new.update(reference.paths["b"], "b")
        assert status == 200, body
        old.kill(signal.SIGCONT)
        status, body = await update
        assert status != 200, body
        async with asyncio.timeout(60):
            while (await old.state())["role"] != "follower":
                await asyncio.sleep(0.05)
        assert await replicas.agreed() == "b"
        status, answer = await old.generate([5, 6, 7])
        assert (status, answer["choices"][0]["weight_versions"][-1]["version"]) == (200, "b")
        # It hands changes on like any other one.
        status, body = await old.update(reference.paths["a"], "a")
        assert status == 200, body
        assert await replicas.agreed() == "a"


async def test_a_lost_operation_runs_again_under_its_key_at_the_next_leader(
    workers: Workers, reference: Reference, store_url: str, tmp_path: Path
) -> None:
    key = {"Idempotency-Key": "once"}
    async with replicated(workers, reference, store_url) as replicas:
        leader, (survivor,) = await replicas.leader(), await replicas.followers()

        async def kill() -> None:
            leader.kill()

        replicas.injectors[0].strike("commit", "hook", hook=kill)
        status, _ = await survivor.update(reference.paths["a"], "a", **key)
        assert status == 503
        begun = monotonic()
        while True:
            status, body = await survivor.update(reference.paths["a"], "a", **key)
            if status == 200:
                break
            assert monotonic() - begun < 2 * FAILOVER_SECONDS, body
            await asyncio.sleep(0.1)
        operations = (await survivor.state())["operations"]
        updates = [each["status"] for each in operations if each["kind"] == "update_weights"]
        assert updates == ["done", "lost"]
        again = await survivor.update(reference.paths["a"], "a", **key)
        assert again[1]["operation"]["id"] == body["operation"]["id"]
        assert await replicas.agreed() == "a"
