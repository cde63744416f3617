"""Discovery of the workers of a Dynamo deployment, and watching them join and leave."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from functools import partial

import pytest

from lockstep.backends.admin_client import CallBudget, CallBudgets
from lockstep.backends.dynamo.discovery import (
    DiscoveredWorker,
    DynamoDiscovery,
    wait_until_ready,
    watch,
    workers_url,
)
from lockstep.tokens.errors import (
    BadRequest,
    ContractError,
    DeadlineExceeded,
    Unavailable,
)
from tests.backends import scripted
from tests.backends.scripted import Reply, Request, serving, whole

QUICK = CallBudgets(quick=CallBudget(0.5, 1, tries=1))
FRONTEND = "http://front:8000"


async def believed(*_: str) -> None:
    """Takes every worker for the one it is listed as."""


captured = partial(scripted.captured, "dynamo")


def answering(*replies: Reply):
    turn = iter(replies)
    last = [replies[-1]]

    def script(request: Request) -> Reply:
        assert request.path == "/v1/rl/workers"
        last[0] = next(turn, last[0])
        return last[0]

    return script


async def discovered(reply: Reply) -> dict[str, DiscoveredWorker]:
    async with serving(answering(reply)) as server:
        discovery = DynamoDiscovery(FRONTEND, server.url, budgets=QUICK, identify=believed)
        try:
            return {one.id: one for one in await discovery.find()}
        finally:
            await discovery.close()


async def test_dynamo_ids_keep_all_64_bits() -> None:
    (one,) = (await discovered(captured("rl_workers"))).values()
    assert one.id == "14158359886483287760"
    assert (one.admin_url, one.data_url, one.backend) == (
        "http://127.0.0.1:18081",
        FRONTEND,
        "dynamo",
    )
    assert (one.model, one.ready, one.error) == ("own-model", True, None)
    assert "update_weights_from_disk" in one.routes
    assert len(await discovered(captured("rl_workers_two"))) == 2


@pytest.mark.failure_mode("F35")
async def test_a_dynamo_worker_with_an_error_is_not_ready() -> None:
    workers = await discovered(captured("rl_workers_after_kill9"))
    dead, alive = workers["10482494335621261157"], workers["11031378106565546037"]
    assert (dead.ready, dead.admin_url) == (False, None)
    assert "TCP connection" in (dead.error or "")
    assert alive.ready


@pytest.mark.failure_mode("F72")
async def test_only_the_worker_at_a_shared_system_url_is_ready() -> None:
    async with serving(lambda _: whole(b'x{worker_id="2a"} 0\n')) as worker:
        listed = [{"instance_id": one, "system_url": worker.url} for one in (42, 43)]
        async with serving(answering(whole({"protocol_version": 1, "workers": listed}))) as server:
            discovery = DynamoDiscovery(FRONTEND, server.url, budgets=QUICK)
            ready = {one.id: one.ready for one in await discovery.find()}
            await discovery.close()
    assert ready == {"42": True, "43": False}


async def test_a_loopback_system_url_is_only_valid_on_the_host_of_discovery() -> None:
    worker = {"instance_id": 1, "system_url": "http://127.0.0.1:9"}
    async with serving(answering(whole({"protocol_version": 1, "workers": [worker]}))) as server:
        # The same server by an address that is not a loopback one.
        for url, ready in ((server.url, True), (server.url.replace("127.0.0.1", "0.0.0.0"), False)):
            discovery = DynamoDiscovery(FRONTEND, url, budgets=QUICK, identify=believed)
            (one,) = await discovery.find()
            assert one.ready is ready
            assert ready or "its own host" in (one.error or "")
            await discovery.close()


@pytest.mark.failure_mode("F72")
async def test_a_worker_is_ready_when_its_metrics_have_its_id() -> None:
    metrics = [
        (b'x{a="b",worker_id="2a"} 0\ny{worker_id="2a"} 1\n', None),
        (b'x{worker_id="2b"} 0\n', "belongs to worker 43 here"),
        (b'x{worker_id="2a"} 0\nx{worker_id="2b"} 0\n', "belongs to worker 42, 43 here"),
        (b"process_cpu_seconds_total 1\n", "does not report its worker id"),
    ]
    for text, error in metrics:
        async with serving(lambda _, text=text: whole(text)) as worker:
            listed = {"instance_id": 42, "system_url": worker.url}
            reply = whole({"protocol_version": 1, "workers": [listed]})
            async with serving(answering(reply)) as server:
                discovery = DynamoDiscovery(FRONTEND, server.url, budgets=QUICK)
                for _ in range(2):
                    (one,) = await discovery.find()
                    assert one.ready is (error is None)
                    assert (error or "") in (one.error or "")
                # One that was believed is not asked again; others get their chance.
                assert len(worker.requests) == (1 if error is None else 2)
                assert {request.path for request in worker.requests} == {"/metrics"}
                await discovery.close()


@pytest.mark.failure_mode("F72")
async def test_a_worker_whose_system_url_does_not_respond_is_not_ready() -> None:
    listed = {"instance_id": 42, "system_url": "http://127.0.0.1:9"}
    async with serving(answering(whole({"protocol_version": 1, "workers": [listed]}))) as server:
        discovery = DynamoDiscovery(FRONTEND, server.url, budgets=QUICK)
        (one,) = await discovery.find()
        assert not one.ready
        assert "http://127.0.0.1:9 cannot be reached from here" in (one.error or "")
        with pytest.raises(DeadlineExceeded, match="cannot be reached from here"):
            await wait_until_ready(discovery, own=frozenset({"42"}), seconds=0.2, interval=0.01)
        assert await wait_until_ready(discovery, own=frozenset(), seconds=5) == {one}
        await discovery.close()


@pytest.mark.failure_mode("F23")
@pytest.mark.parametrize(
    "reply",
    [whole(b"null"), whole({"workers": []}), whole({"protocol_version": 1, "workers": [{}]})],
)
async def test_an_invalid_worker_list_is_an_error(reply: Reply) -> None:
    with pytest.raises(ContractError):
        await discovered(reply)
    with pytest.raises(Unavailable, match="protocol 2"):
        await discovered(whole({"protocol_version": 2, "workers": []}))


def test_the_discovery_url_comes_from_the_frontend_and_the_port_variable() -> None:
    assert workers_url("http://front:8000/v1", {}) == "http://front:8001"
    assert workers_url("http://[::1]:8000", {"DYN_RL_PORT": "9"}) == "http://[::1]:9"
    with pytest.raises(BadRequest, match="DYN_RL_PORT"):
        workers_url(FRONTEND, {"DYN_RL_PORT": "x"})
    with pytest.raises(BadRequest, match="frontend"):
        workers_url("front:8000", {})


async def test_discovery_is_polled_until_workers_are_ready() -> None:
    empty = whole({"protocol_version": 1, "workers": []})
    replies = (Reply(fault="reset"), empty, captured("rl_workers_after_kill9"),
               captured("rl_workers_two"))  # fmt: skip
    async with serving(answering(*replies)) as server:
        discovery = DynamoDiscovery(FRONTEND, server.url, budgets=QUICK, identify=believed)
        workers = await wait_until_ready(discovery, 2, seconds=10, interval=0.01)
        assert len(workers) == 2
        assert len(server.requests) == 4
        await discovery.close()
    async with serving(answering(captured("rl_workers_after_kill9"))) as server:
        discovery = DynamoDiscovery(FRONTEND, server.url, budgets=QUICK, identify=believed)
        with pytest.raises(DeadlineExceeded, match="1 are ready; 10482494335621261157: Unavail"):
            await wait_until_ready(discovery, 2, seconds=0.2, interval=0.01)
        await discovery.close()


class Turns:
    """A discovery that returns these results in turn, then the last one forever."""

    def __init__(self, *looks: frozenset[DiscoveredWorker] | Unavailable) -> None:
        self._looks = list(looks)
        self.over = asyncio.Event()

    async def find(self) -> frozenset[DiscoveredWorker]:
        look = self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]
        if len(self._looks) == 1:
            self.over.set()
        if isinstance(look, Unavailable):
            raise look
        return look

    async def close(self) -> None:
        return None


A = DiscoveredWorker("a", "http://a", "http://a")
B = DiscoveredWorker("b", "http://b", "http://b")


@pytest.mark.failure_mode("F26")
async def test_watch_yields_changes_and_keeps_workers_when_a_lookup_fails() -> None:
    sick = replace(A, ready=False, error="why")
    turns = Turns(
        Unavailable("not yet"),
        frozenset({A}),
        Unavailable("no name server"),
        frozenset({A}),
        frozenset({A, B}),
        frozenset({sick, B}),
        frozenset(),
    )
    async with aclosing(watch(turns, 0.001)) as changes:
        seen = [await anext(changes) for _ in range(4)]
    assert [change.came for change in seen] == [{A}, {B}, {sick}, set()]
    assert [change.left for change in seen] == [set(), set(), {A}, {sick, B}]
    assert seen[1].now == {A, B}


async def test_watch_ends_when_it_is_cancelled() -> None:
    turns = Turns(frozenset({A}))

    async def follow() -> None:
        async for _ in watch(turns, 0.001):
            pass

    task = asyncio.create_task(follow())
    await turns.over.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(BadRequest, match="interval"):
        await anext(watch(turns, 0))
