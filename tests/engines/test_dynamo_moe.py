"""Routed experts through a real Dynamo frontend: the choices of the router, once, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

import lockstep
from lockstep.models import bundled
from tests.engine.checkpoints import reference
from tests.engine.model.test_moe import routed
from tests.engines.dynamo_deployment import Deployment, deployed, needs_dynamo

pytestmark = needs_dynamo
MOE = bundled("tiny-moe") or Path()
PROMPT = [(11 * at) % 500 for at in range(1, 60)]


@pytest.fixture(scope="module")
def dynamo() -> Iterator[Deployment]:
    with deployed("tiny-moe", 1) as deployment:
        yield deployment


@pytest.mark.failure_mode("F38")
@pytest.mark.parametrize("transport", ["dynamo", "dynamo-generate"])
async def test_rows_are_the_choices_of_the_router(dynamo: Deployment, transport: str) -> None:
    async with lockstep.connect(
        dynamo.url, transport=transport, max_tokens=20, ignore_eos=True, seed=2
    ) as policy:
        [whole] = await policy.generate(PROMPT, experts_start=0)
        [part] = await policy.generate(PROMPT, experts_start=40)
    assert whole.experts is not None
    assert part.experts is not None
    ids = PROMPT + whole.token_ids
    assert (whole.experts.numpy() == routed(MOE, ids)[:-1]).all()
    assert part.experts.start == 40
    assert (part.experts.numpy() == whole.experts.numpy()[40:]).all()
    assert whole.logprobs == reference(MOE, ids)[len(PROMPT) - 1 :]


async def test_a_stream_carries_them_too_and_nobody_gets_them_unasked(dynamo: Deployment) -> None:
    options = {"max_tokens": 20, "ignore_eos": True, "seed": 2}
    async with lockstep.connect(dynamo.url, **options) as policy:
        [whole] = await policy.generate(PROMPT, experts_start=0)
        *_, last = [item async for item in policy.stream(PROMPT, experts_start=0)]
        [without] = await policy.generate(PROMPT)
    assert isinstance(last, lockstep.Completion)
    assert last.experts == whole.experts
    assert without.experts is None


async def test_stock_clients_ask_with_an_extra_field(dynamo: Deployment) -> None:
    body = {
        "model": "tiny-moe",
        "messages": [{"role": "user", "content": "-"}],
        "max_tokens": 4,
        "nvext": {"token_data": PROMPT, "extra_fields": ["routed_experts"]},
    }
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{dynamo.url}/v1/chat/completions", json=body) as response:
            experts = (await response.json())["nvext"]["routed_experts"]
    assert experts["shape"][1:] == [2, 2]
    assert experts["start"] == 0
