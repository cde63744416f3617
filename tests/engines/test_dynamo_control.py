"""Weights and adapters of a real Dynamo worker, changed under load through its routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import lockstep
from lockstep.backends.admin import Source
from lockstep.backends.dynamo.admin import TRANSACTION, DynamoAdmin
from lockstep.backends.dynamo.frontend_probe import FrontendProbeAdmin
from lockstep.models import bundled
from lockstep.tokens import Completion
from lockstep.tokens.errors import CheckpointError, Conflict, UnknownModel
from tests.engine.checkpoints import adapter, reference, variant
from tests.engines.dynamo_deployment import Deployment, deployed, needs_dynamo

pytestmark = needs_dynamo
TINY = bundled("tiny") or Path()
PROMPT = [10, 20, 30, 40]
PROBE = [[(5 * at) % 500 for at in range(1, 40)], [3, 1, 4, 1, 5]]


@pytest.fixture(scope="module")
def dynamo() -> Iterator[Deployment]:
    with deployed("tiny", 1) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that are not those the worker starts with."""
    return variant(TINY, tmp_path_factory.mktemp("weights") / "step-1", seed=1)


@pytest.fixture
async def admin(dynamo: Deployment) -> AsyncIterator[DynamoAdmin]:
    opened = await dynamo.admin()
    yield opened
    await opened.close()


@pytest.fixture
async def policy(dynamo: Deployment) -> AsyncIterator[lockstep.Policy]:
    async with lockstep.connect(
        dynamo.url, model="tiny", max_tokens=32, ignore_eos=True, seed=5
    ) as policy:
        yield policy


@asynccontextmanager
async def load(policy: lockstep.Policy, completions: list[Completion]) -> AsyncIterator[None]:
    """Four callers that send requests while the block runs; what they got is in `completions`."""
    ending = asyncio.Event()

    async def caller() -> None:
        while not ending.is_set():
            completions.extend(await policy.generate(PROMPT, max_tokens=200))

    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(caller())
        try:
            yield
        finally:
            ending.set()


def check_every_token(completion: Completion, weights: dict[str, Path]) -> None:
    """Each token has the logprob that the weights of its version give it."""
    ids = completion.prompt_ids + completion.token_ids
    for span in completion.versions:
        expected = reference(weights[span.version], ids)[len(completion.prompt_ids) - 1 :]
        assert completion.logprobs[span.start : span.end] == expected[span.start : span.end]


@pytest.mark.failure_mode("F43")
async def test_an_update_under_load_labels_every_token(
    admin: DynamoAdmin, policy: lockstep.Policy, other: Path
) -> None:
    assert admin.stages
    assert (await admin.view()).version == "default"
    before = await admin.probe(PROBE)
    assert before == [reference(TINY, ids) for ids in PROBE]
    completions: list[Completion] = []
    async with load(policy, completions):
        await admin.stage(Source(directory=other), "step-1")
        assert (await admin.view()).staged == "step-1"
        await admin.pause("keep")
        await admin.commit("step-1")
        assert await admin.probe(PROBE) == [reference(other, ids) for ids in PROBE]
        await admin.resume()
        while not any(one.versions[0].version == "step-1" for one in completions):
            await asyncio.sleep(0.05)
        assert await admin.rollback() == "default"
    weights = {"default": TINY, "step-1": other}
    assert {span.version for one in completions for span in one.versions} == set(weights)
    assert any(len(one.versions) > 1 for one in completions), "a request lived through a change"
    for one in completions:
        check_every_token(one, weights)
    assert await admin.probe(PROBE) == before


@pytest.mark.failure_mode("F34")
async def test_errors_keep_their_kind_though_dynamo_answers_200(
    admin: DynamoAdmin, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError):
        await admin.stage(Source(directory=tmp_path), "broken")
    with pytest.raises(Conflict):
        await admin.commit("nothing-staged")
    with pytest.raises(UnknownModel, match="nobody"):
        await admin.probe(PROBE, adapter="nobody")
    assert (await admin.view()).version == "default"


@pytest.mark.failure_mode("F31")
async def test_an_adapter_is_a_model_swapped_and_gone(
    admin: DynamoAdmin, policy: lockstep.Policy, dynamo: Deployment, tmp_path: Path
) -> None:
    [plain] = await policy.generate(PROMPT)
    first, second = (adapter(TINY, tmp_path / name, seed=at) for at, name in enumerate("ab"))
    label = await admin.load_adapter("math", first)
    await listed(policy, "math", True)
    async with lockstep.connect(
        dynamo.url, model="math", max_tokens=32, ignore_eos=True, seed=5
    ) as tuned:
        [one] = await tuned.generate(PROMPT)
        assert one.adapter == "math"
        assert one.versions[0].version.endswith(label)
        assert one.logprobs != plain.logprobs
        swapped = await admin.load_adapter("math", second)
        assert swapped != label
        [two] = await tuned.generate(PROMPT)
        assert two.versions[0].version.endswith(swapped)
        assert two.logprobs != one.logprobs
        [base] = await policy.generate(PROMPT)
        assert base.logprobs == plain.logprobs
        assert base.adapter is None
        await admin.unload_adapter("math")
        await listed(policy, "math", False)
        with pytest.raises(UnknownModel):
            await tuned.generate(PROMPT)
    assert (await admin.view()).adapters == {}


async def listed(policy: lockstep.Policy, name: str, there: bool) -> None:
    """Returns when the frontend lists that model, or no longer does."""
    async with asyncio.timeout(30):
        while (name in {card.id for card in await policy.models()}) != there:
            await asyncio.sleep(0.05)


async def test_a_worker_without_a_probe_route_is_proved_through_the_frontend(
    dynamo: Deployment, other: Path
) -> None:
    """As Dynamo's own engines: no staging, and scores only as the logprobs of a prompt."""
    [worker] = await dynamo.discovered()
    routes = tuple(set(worker.routes) - TRANSACTION)
    bare = FrontendProbeAdmin(replace(worker, routes=routes))
    try:
        assert not bare.stages
        assert await bare.probe(PROBE) == [reference(TINY, ids) for ids in PROBE]
        await bare.view()
        await bare.stage(Source(directory=other), "step-1")
        await bare.pause("abort")
        await bare.commit("step-1")
        await bare.resume()
        assert await bare.probe(PROBE) == [reference(other, ids) for ids in PROBE]
        await bare.stage(Source(directory=TINY), "default")
        await bare.pause("abort")
        await bare.commit("default")
        await bare.resume()
        assert await bare.probe(PROBE) == [reference(TINY, ids) for ids in PROBE]
    finally:
        await bare.close()
