"""A fleet behind a real Dynamo frontend: proved updates, and workers that die in the middle."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lockstep.backends.dynamo.transport import pinned_url
from lockstep.backends.registry import open_transport
from lockstep.engine.probe import write_probe
from lockstep.fleet.dynamo_follower import follow_discovery
from lockstep.fleet.fleet import Fleet
from lockstep.fleet.remote import RemoteFleet
from lockstep.fleet.routing.affinity import Affinity
from lockstep.fleet.routing.pool import Pool
from lockstep.fleet.worker import Worker
from lockstep.models import bundled
from lockstep.protocol.common.request import GenerateRequest
from lockstep.tokens import Completion, Sampling
from lockstep.tokens.errors import BadRequest, LockstepError, Unavailable
from tests.engine.checkpoints import adapter, reference, trainer, variant
from tests.engines.dynamo_deployment import Deployment, deployed, needs_dynamo

pytestmark = needs_dynamo
TINY = bundled("tiny") or Path()
TOKEN = "test-admin-token"
PROMPT = [10, 20, 30, 40]
REQUEST = GenerateRequest(
    prompt_ids=PROMPT,
    model="tiny",
    sampling=Sampling(max_tokens=32, ignore_eos=True, seed=5),
)
LONG = replace(REQUEST, sampling=replace(REQUEST.sampling, max_tokens=3000))


@pytest.fixture(scope="module")
def dynamo() -> Iterator[Deployment]:
    """Two workers, of which the last test that uses them kills one."""
    with deployed("tiny", 2) as deployment:
        yield deployment


@pytest.fixture
def doomed() -> Iterator[Deployment]:
    """Two workers for one test."""
    with deployed("tiny", 2) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = variant(TINY, tmp_path_factory.mktemp("weights") / "step-1", seed=1)
    write_probe(trainer(path), path, version="step-1")
    return path


@asynccontextmanager
async def closing(opened: Any) -> AsyncIterator[Any]:
    try:
        yield opened
    finally:
        await opened.close()


@asynccontextmanager
async def fleet_of(dynamo: Deployment) -> AsyncIterator[Fleet]:
    pool = Pool()
    async with pool, Fleet(pool, model_dir=TINY) as fleet, closing(dynamo.discovery()) as discovery:
        async with follow_discovery(fleet, discovery, look_seconds=0.2):
            await pool.wait_ready(2, 60.0)
            yield fleet


async def generate(
    fleet: Fleet, one: GenerateRequest = REQUEST, worker: str | None = None
) -> Completion:
    async def call(chosen: Worker) -> list[Completion]:
        return await chosen.transport.generate(one)

    [completion] = await fleet.pool.run(Affinity.of(one.prompt_ids, worker=worker), call)
    return completion


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.05)


async def test_a_pinned_url_is_that_worker_or_an_error(dynamo: Deployment) -> None:
    name = dynamo.workers[1]["instance_id"]
    async with closing(await open_transport(pinned_url(dynamo.url, name))) as one:
        for _ in range(4):
            [completion] = await one.generate(REQUEST)
            assert completion.worker == name
        with pytest.raises(BadRequest, match="leave it out"):
            await one.generate(replace(REQUEST, nvext={"backend_instance_id": 7}))
    async with closing(await open_transport(pinned_url(dynamo.url, "123"), "dynamo")) as gone:
        with pytest.raises(Unavailable, match="does not list worker 123"):
            await gone.generate(REQUEST)


@pytest.fixture
def gateway(dynamo: Deployment) -> Iterator[dict[str, Any]]:
    """`lockstep gateway --dynamo`: what it printed when it was ready."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("LOCKSTEP_", "DYN_"))}
    port = dynamo.rl_url.rpartition(":")[2]
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep", "gateway", "--dynamo", dynamo.url, "--json",
         "--port", "0", "--admin-port", "0", "--sessions", "memory", "--tokenizer", "tiny"],
        stdout=subprocess.PIPE, text=True,
        env={**clean, "DYN_RL_PORT": port, "LOCKSTEP_ADMIN_TOKEN": TOKEN},
    )  # fmt: skip
    try:
        line = process.stdout.readline() if process.stdout else ""
        assert line, f"the gateway ended with code {process.wait()}"
        yield json.loads(line)
    finally:
        process.terminate()
        assert process.wait(60) == 0


async def test_a_gateway_gives_sessions_and_updates_to_a_deployment(
    dynamo: Deployment, gateway: dict[str, Any], tmp_path: Path
) -> None:
    new = variant(TINY, tmp_path / "step-0", seed=9)
    write_probe(trainer(new), new, version="step-0")
    async with RemoteFleet(gateway["admin_url"], token=TOKEN) as fleet:
        async with aiohttp.ClientSession(gateway["url"]) as http:
            messages: list[dict[str, str]] = []
            for question in ("Reverse: 40213", "And 771"):
                messages.append({"role": "user", "content": question})
                body = {"model": "tiny", "messages": messages, "max_tokens": 24, "seed": 1}
                headers = {"X-Session-ID": "s1"}
                async with http.post("/v1/chat/completions", json=body, headers=headers) as got:
                    assert got.status == 200, await got.text()
                    messages.append((await got.json())["choices"][0]["message"])
                if len(messages) == 2:
                    assert (await fleet.update_weights(str(new))).version == "step-0"
        [sample] = await fleet.samples("s1")
        assert (await fleet.state())["serving"] == 2
    assert [span.version for span in sample.versions] == ["default", "step-0"]
    before, after = reference(TINY, sample.token_ids), reference(new, sample.token_ids)
    for span, expected in zip(sample.versions, (before, after), strict=True):
        assert sample.logprobs[span.start : span.end] == expected[span.start - 1 : span.end - 1]


async def test_a_gateway_aborts_by_id_also_requests_of_the_same_id_and_all_choices(
    gateway: dict[str, Any],
) -> None:
    async with aiohttp.ClientSession(gateway["url"]) as http:

        async def generate(n: int) -> list[tuple[str, int]]:
            sampling = {"max_tokens": 3000, "ignore_eos": True, "n": n, "seed": 1}
            body = {"request_id": "same", "model": "tiny", "token_ids": PROMPT,
                    "sampling_params": sampling}  # fmt: skip
            async with http.post("/inference/v1/generate", json=body) as reply:
                result = await reply.json()
                assert reply.status == 200, result
            choices = result["choices"]
            return [(choice["finish_reason"], len(choice["token_ids"])) for choice in choices]

        running = [asyncio.create_task(generate(n)) for n in (1, 2)]
        stopped = 0
        async with asyncio.timeout(60):
            while stopped < 3:
                async with http.post(
                    "/inference/v1/abort_requests", json={"request_ids": ["same"]}
                ) as reply:
                    stopped += (await reply.json())["aborted"]
        for choices in await asyncio.gather(*running):
            assert all(finish == "abort" and count < 3000 for finish, count in choices), choices


async def test_the_whole_life_of_a_fleet(dynamo: Deployment, other: Path, tmp_path: Path) -> None:
    names = {one["instance_id"] for one in dynamo.workers}
    async with fleet_of(dynamo) as fleet:
        assert {worker.id for worker in fleet.workers} == names
        for name in names:
            assert (await generate(fleet, worker=name)).worker == name

        operation = await fleet.update_weights(str(other), version="step-1")
        assert operation.status == "done"
        for name in names:
            completion = await generate(fleet, worker=name)
            assert [span.version for span in completion.versions] == ["step-1"]
            expected = reference(other, PROMPT + completion.token_ids)
            assert completion.logprobs == expected[len(PROMPT) - 1 :]

        await fleet.load_adapter("math", str(adapter(other, tmp_path / "a", seed=3)))
        for name in names:
            assert (await generate(fleet, replace(REQUEST, model="math"), name)).adapter == "math"
        await fleet.unload_adapter("math")

        # Dead in mid-generation: a typed error for what was pinned there, and the other
        # worker serves everybody else.
        victim = dynamo.workers[0]["instance_id"]
        running = asyncio.create_task(generate(fleet, LONG, victim))
        admin = fleet.worker(victim).control
        while not (await admin.view()).in_flight:
            await asyncio.sleep(0.02)
        dynamo.kill(0)
        with pytest.raises(Unavailable):
            await running
        free = [generate(fleet) for _ in range(8)]
        assert {one.worker for one in await asyncio.gather(*free)} == names - {victim}
        await until(lambda: {worker.id for worker in fleet.workers} == names - {victim})
        with pytest.raises(LockstepError):
            await generate(fleet, worker=victim)


@pytest.mark.failure_mode("F35")
async def test_a_worker_that_dies_in_mid_update_is_left_out(
    doomed: Deployment, other: Path
) -> None:
    victim, survivor = (one["instance_id"] for one in doomed.workers)
    async with fleet_of(doomed) as fleet:
        admin = fleet.worker(victim).control
        staged = admin.stage

        async def stage_and_die(*args: object) -> None:
            await staged(*args)  # type: ignore[arg-type]
            doomed.kill(0)

        admin.stage = stage_and_die  # type: ignore[method-assign]
        operation = await fleet.update_weights(str(other), version="step-1")
        assert operation.workers[survivor].status == "ok"
        assert operation.workers[victim].status == "quarantined"
        for _ in range(4):
            completion = await generate(fleet)
            assert completion.worker == survivor
            assert [span.version for span in completion.versions] == ["step-1"]
