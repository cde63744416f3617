"""Weight updates of a real vLLM server with a mixture of experts."""

from __future__ import annotations

import asyncio
from time import perf_counter

import pytest

from lockstep.backends import GenerateRequest
from lockstep.backends.admin import Source
from lockstep.tokens import Sampling
from lockstep.tokens.errors import EngineFailure
from tests.engines.vllm_load import furthest_off, under_load
from tests.engines.vllm_models import TOLERANCE
from tests.engines.vllm_servers import Vllm, probe_off, updated

pytestmark = pytest.mark.timeout(400)
SKIP = "LOCKSTEP_VLLM_SKIP_REPAIRS"


async def test_the_first_request_with_logprobs_does_not_wait_for_a_compiler(moe: Vllm) -> None:
    begun = perf_counter()
    async with moe.transport() as transport:
        await transport.generate(
            GenerateRequest(
                prompt_ids=[1, 2, 3], sampling=Sampling(max_tokens=2, logprobs=1), timeout=60
            )
        )
    took = perf_counter() - begun
    print(f"first logprobs after {took:.2f} s")
    assert took < 5.0  # it is 5 to 12 s with torch.compile on an idle machine


async def test_experts_go_there_and_back_under_load(moe: Vllm) -> None:
    steps = ((moe.b, "B1"), (moe.a, "A1"), (moe.b, "B2"), (moe.a, "A2"))
    async with moe.admin() as admin:
        async with under_load(moe) as done:
            offs = []
            for path, version in steps:
                await asyncio.sleep(0.5)
                offs.append(await updated(moe, admin, path, version))
            await asyncio.sleep(0.5)
        assert max(offs) <= TOLERANCE
        assert await probe_off(moe, admin, moe.a) <= TOLERANCE
    off = furthest_off(done, {"default": moe.a, **{name: path for path, name in steps}})
    print(f"parity of steps {offs}; {len(done)} requests, off {off}")
    assert off <= TOLERANCE


@pytest.mark.failure_mode("F28")
async def test_the_probe_catches_experts_that_were_not_packed(moe: Vllm) -> None:
    async with moe.admin() as admin:
        await moe.rpc("faulty_environ", name=SKIP, value="experts")
        try:
            off = await updated(moe, admin, moe.b, "unpacked")
        finally:
            await moe.rpc("faulty_environ", name=SKIP, value="")
        print(f"without the repair: off by {off}")
        assert off > 0.01
        assert await updated(moe, admin, moe.a, "mended") <= TOLERANCE


async def test_a_failed_load_of_experts_leaves_the_old_ones(moe: Vllm) -> None:
    async with moe.admin() as admin:
        assert await updated(moe, admin, moe.a, "good") <= TOLERANCE
        await admin.stage(Source(directory=moe.b), "bad")
        await admin.pause("keep")
        await moe.rpc("faulty_load", after=30)
        with pytest.raises(EngineFailure, match="old weights were put back"):
            await admin.commit("bad")
        assert await probe_off(moe, admin, moe.a) <= TOLERANCE
        assert await admin.rollback() == "good"
        await admin.resume()
        assert await updated(moe, admin, moe.b, "next") <= TOLERANCE
