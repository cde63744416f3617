"""Requests to a real SGLang server."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from lockstep.backends.transport import GenerateRequest, StreamDelta
from lockstep.tokens import Completion, Sampling
from lockstep.tokens.errors import BadTokenId, PromptTooLong, UnknownModel
from tests.engines.sglang_servers import Sglang, probe_off, updated
from tests.engines.vllm_models import TOLERANCE, Reference, adapter, merged

pytestmark = pytest.mark.timeout(400)
PROMPT = [7, 11, 13, 17, 19, 23]


def request_of(prompt: list[int] = PROMPT, **options: object) -> GenerateRequest:
    names = ("model", "request_id", "cache_salt")
    outer = {name: options.pop(name) for name in names if name in options}
    sampling = {"max_tokens": 12, "ignore_eos": True, **options}
    return GenerateRequest(prompt_ids=prompt, sampling=Sampling(**sampling), timeout=60, **outer)  # type: ignore[arg-type]


async def test_logprobs_of_prompt_and_completion_are_those_of_transformers(sglang: Sglang) -> None:
    async with sglang.transport() as transport:
        (card,) = [card for card in await transport.models() if card.parent is None]
        assert card.id == "a"
        (completion,) = await transport.generate(request_of(prompt_logprobs=0, model="a"))
        right = Reference(sglang.a).score([*PROMPT, *completion.token_ids])
    scored = [entry.logprob for entry in (completion.prompt_logprobs or ())[1:] if entry]
    given = [*scored, *completion.logprobs]
    assert max(abs(one - other) for one, other in zip(given, right, strict=True)) <= TOLERANCE
    assert completion.logprob_mode == "processed"
    assert [span.version for span in completion.versions] == ["default"]


async def test_streams_are_deltas_and_equal_the_whole(sglang: Sglang) -> None:
    request = request_of(temperature=0.0, max_tokens=20)
    async with sglang.transport() as transport:
        (whole,) = await transport.generate(request)
        deltas: list[StreamDelta] = []
        async with aclosing(transport.stream(request)) as items:
            async for item in items:
                if isinstance(item, Completion):
                    streamed = item
                else:
                    deltas.append(item)
    assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
    assert len([delta for delta in deltas if delta.token_ids]) > 2
    assert streamed.token_ids == whole.token_ids
    assert streamed.versions == whole.versions


async def test_choices_differ_and_keep_their_order(sglang: Sglang) -> None:
    async with sglang.transport() as transport:
        choices = await transport.generate(request_of(n=3, seed=5))
    assert [choice.index for choice in choices] == [0, 1, 2]
    assert len({tuple(choice.token_ids) for choice in choices}) == 3


@pytest.mark.failure_mode("F45")
async def test_an_abort_keeps_tokens_and_spares_ids_that_begin_alike(sglang: Sglang) -> None:
    async with sglang.transport() as transport:
        long = {"max_tokens": 3000}
        ended, spared = (
            asyncio.create_task(transport.generate(request_of(request_id=name, **long)))
            for name in ("run-1", "run-10")
        )
        await asyncio.sleep(0.5)
        await transport.abort("run-1")
        (completion,) = await ended
        assert completion.finish == "abort"
        assert 0 < len(completion.token_ids) == len(completion.logprobs) < 3000
        assert not spared.done()
        await transport.abort("run-10")
        (other,) = await spared
        assert other.finish == "abort"


@pytest.mark.failure_mode("F68")
async def test_ids_that_would_kill_the_server_are_not_sent(sglang: Sglang) -> None:
    async with sglang.transport() as transport:
        for wrong in (512, 2**31 - 1):
            with pytest.raises(BadTokenId, match=rf"prompt_ids\[1\] is {wrong}: .* 0 to 511"):
                await transport.generate(request_of([5, wrong]))
        with pytest.raises(BadTokenId, match="empty"):
            await transport.generate(request_of([]))
        with pytest.raises(PromptTooLong):
            await transport.generate(request_of([5] * 4096))
        (completion,) = await transport.generate(request_of())
        assert len(completion.token_ids) == 12


async def test_an_adapter_is_served_by_name_and_unknown_ones_are_not(
    sglang: Sglang, tmp_path: Path
) -> None:
    path = adapter(sglang.a, tmp_path / "adapter", seed=44)
    both = merged(sglang.a, path, tmp_path / "merged")
    async with sglang.admin() as admin, sglang.transport() as transport:
        assert await updated(admin, sglang.a, "adapted") <= TOLERANCE
        await admin.load_adapter("policy", path, "one")
        assert (await admin.view()).adapters == {"policy": "one"}
        (completion,) = await transport.generate(request_of(prompt_logprobs=0, model="policy"))
        assert completion.adapter == "policy"
        right = Reference(both).score([*PROMPT, *completion.token_ids])[len(PROMPT) - 1 :]
        off = max(abs(a - b) for a, b in zip(completion.logprobs, right, strict=True))
        assert off <= 2e-5  # adapters are applied in another order than merged weights
        # The base model is unchanged, also after the update of the name.
        (card,) = [card for card in await transport.models() if card.parent is None]
        assert card.id == "a"
        assert await probe_off(admin, sglang.a) <= TOLERANCE
        await admin.load_adapter("policy", path, "two")
        assert (await admin.view()).adapters == {"policy": "two"}
        await admin.unload_adapter("policy")
        assert (await admin.view()).adapters == {}
        with pytest.raises(UnknownModel):
            async with sglang.transport() as fresh:
                await fresh.generate(request_of(model="policy"))
