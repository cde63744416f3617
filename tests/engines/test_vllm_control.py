"""Pauses and adapters of a real vLLM server."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from lockstep.backends.admin import Admin, PauseMode
from lockstep.backends.transport import GenerateRequest
from lockstep.tokens import Completion, Sampling
from lockstep.tokens.errors import AdapterError, LockstepError, UnknownModel, UnsupportedField
from tests.engines import vllm_models as models
from tests.engines.vllm_load import begun
from tests.engines.vllm_models import TOLERANCE, Reference, furthest
from tests.engines.vllm_servers import Vllm, probe_off, updated

pytestmark = pytest.mark.timeout(400)
LONG = [(31 * at) % 500 for at in range(300)]
"""More than two blocks of the prefix cache."""
LONGEST = 600


def question(tokens: int, model: str | None = None) -> GenerateRequest:
    sampling = Sampling(max_tokens=tokens, ignore_eos=True)
    return GenerateRequest(prompt_ids=LONG, sampling=sampling, model=model, timeout=180)


async def generated(server: Vllm, tokens: int, model: str | None = None) -> Completion:
    async with server.transport() as transport:
        (completion,) = await transport.generate(question(tokens, model))
        return completion


TRIES = 6
"""A busy client may pause a server when the request has just ended: then nothing was shown yet."""


async def paused_under(server: Vllm, admin: Admin, mode: PauseMode) -> asyncio.Task[Completion]:
    """Pauses the server; returns a request that was still running then, where the mode lets it."""
    for _ in range(TRIES):
        running = await begun(server, question(LONGEST))
        await admin.pause(mode)
        await asyncio.sleep(0.4)
        if mode == "wait" or not running.done() or running.result().finish == "abort":
            return running
        await admin.resume()
    raise AssertionError(f"{TRIES} requests in turn had ended when the server was paused")


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
async def test_a_pause_leaves_nothing_running(dense: Vllm, mode: PauseMode) -> None:
    async with dense.admin() as admin:
        running = await paused_under(dense, admin, mode)
        assert (await admin.view()).paused is True
        queued = asyncio.create_task(generated(dense, 1))
        await asyncio.sleep(0.4)
        assert not queued.done()
        if mode == "keep":
            assert not running.done()
        else:
            completion = await asyncio.wait_for(running, 30)
            whole = len(completion.token_ids) == LONGEST
            assert (completion.finish, whole) == (
                ("abort", False) if mode == "abort" else ("length", True)
            )
        await admin.resume()
        assert (await admin.view()).paused is False
        assert len((await asyncio.wait_for(queued, 60)).token_ids) == 1
        if mode == "keep":
            assert len((await asyncio.wait_for(running, 60)).token_ids) == LONGEST


async def test_a_probe_of_a_paused_server_disturbs_nobody(dense: Vllm) -> None:
    async with dense.admin() as admin:
        await updated(dense, admin, dense.a, "still")
        running = await begun(dense, question(100))
        await admin.pause("keep")
        for _ in range(3):
            assert await probe_off(dense, admin, dense.a) <= TOLERANCE
        with pytest.raises(UnsupportedField, match="resume it without traffic"):
            await admin.probe([[1, 2, 3]], adapter="any")
        await admin.resume()
        completion = await asyncio.wait_for(running, 60)
    right = Reference(dense.a).score([*LONG, *completion.token_ids])[len(LONG) - 1 :]
    assert max(abs(p - q) for p, q in zip(completion.logprobs, right, strict=True)) <= TOLERANCE


@pytest.mark.failure_mode("F30")
async def test_adapters_are_swapped_exactly(dense: Vllm) -> None:
    folder = dense.folder
    one = models.adapter(dense.a, folder / "lora-1", seed=11)
    two = models.adapter(dense.a, folder / "lora-2", seed=12)
    sequences = [LONG, [5, 6, 7, 8]]
    right = [Reference(_merged(dense, lora)).rows(sequences) for lora in (one, two)]
    base = Reference(dense.a).rows(sequences)
    async with dense.admin() as admin:
        await updated(dense, admin, dense.a, "base")
        for path, rows in ((one, right[0]), (two, right[1]), (one, right[0])):
            await admin.load_adapter("style", path, label=path.name)
            assert (await admin.view()).adapters == {"style": path.name}
            off = furthest(await admin.probe(sequences, adapter="style"), rows)
            print(f"adapter {path.name}: off by {off}")
            assert off <= TOLERANCE
            assert furthest(await admin.probe(sequences), base) <= TOLERANCE
        # The same path with other contents: what was cached under it must be forgotten.
        assert (await generated(dense, 1, "style")).adapter == "style"
        shutil.copy(two / "adapter_model.safetensors", one / "adapter_model.safetensors")
        await admin.load_adapter("style", one, label="new contents")
        assert furthest(await admin.probe(sequences, adapter="style"), right[1]) <= TOLERANCE
        completion = await generated(dense, 8, "style")
        known = Reference(_merged(dense, two))
        expected = known.score([*LONG, *completion.token_ids])[len(LONG) - 1 :]
        worst = max(abs(p - q) for p, q in zip(completion.logprobs, expected, strict=True))
        assert worst <= TOLERANCE
        await admin.unload_adapter("style")
        assert (await admin.view()).adapters == {}
        with pytest.raises(UnknownModel):
            await generated(dense, 1, "style")


async def test_an_adapter_outlives_an_update_of_the_base(dense: Vllm) -> None:
    lora = models.adapter(dense.a, dense.folder / "lora-3", seed=13)
    sequences = [[9, 8, 7, 6, 5]]
    async with dense.admin() as admin:
        await updated(dense, admin, dense.a, "under-a")
        await admin.load_adapter("kept", lora)
        for base, version in ((dense.b, "under-b"), (dense.a, "under-a-again")):
            assert await updated(dense, admin, base, version) <= TOLERANCE
            merged = models.merged(base, lora, dense.folder / f"merged-{version}")
            rows = Reference(merged).rows(sequences)
            assert furthest(await admin.probe(sequences, adapter="kept"), rows) <= TOLERANCE
        await admin.unload_adapter("kept")


@pytest.mark.failure_mode("F29")
async def test_a_bad_adapter_is_refused_and_the_base_never_stands_in(dense: Vllm) -> None:
    good = models.adapter(dense.a, dense.folder / "lora-good", seed=14)
    bad = dense.folder / "lora-bad"
    shutil.copytree(good, bad)
    (bad / "adapter_config.json").write_text("{not json")
    async with dense.admin() as admin:
        for path in (bad, dense.folder / "no-such-adapter"):
            with pytest.raises(AdapterError):
                await admin.load_adapter("broken", path)
        assert (await admin.view()).adapters == {}
        with pytest.raises(UnknownModel):
            await generated(dense, 1, "broken")
        with pytest.raises(LockstepError):
            await admin.unload_adapter("broken")


def _merged(server: Vllm, lora: Path) -> Path:
    target = server.folder / f"merged-{lora.name}"
    return target if target.exists() else models.merged(server.a, lora, target)
