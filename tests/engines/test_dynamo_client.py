"""The client alone on a real Dynamo frontend: tokens and endings are those of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import lockstep
from lockstep.backends.transport import StreamDelta
from lockstep.models import bundled
from lockstep.protocol.common.request import GenerateRequest
from lockstep.tokens import Completion, Sampling
from lockstep.tokens.errors import (
    BadRequest,
    EngineFailure,
    PromptTooLong,
    UnknownModel,
    UnsupportedField,
)
from tests.engine.checkpoints import reference
from tests.engines.dynamo_deployment import Deployment, deployed, needs_dynamo

pytestmark = needs_dynamo
TINY = bundled("tiny") or Path()
PROMPT = [10, 20, 30, 40]
LONG = {"max_tokens": 1500, "ignore_eos": True}


@pytest.fixture(scope="module")
def dynamo() -> Iterator[Deployment]:
    with deployed("tiny", 1) as deployment:
        yield deployment


@pytest.fixture
async def policy(dynamo: Deployment) -> AsyncIterator[lockstep.Policy]:
    async with lockstep.connect(dynamo.url, model="tiny", max_tokens=48, seed=5) as policy:
        yield policy


async def in_flight(dynamo: Deployment, wanted: int) -> None:
    """Returns when the worker has that many requests."""
    admin = await dynamo.admin()
    try:
        async with asyncio.timeout(60):
            while (await admin.view()).in_flight != wanted:
                await asyncio.sleep(0.02)
    finally:
        await admin.close()


async def test_frontend_is_recognised_and_its_worker_named(
    dynamo: Deployment, policy: lockstep.Policy
) -> None:
    assert policy.transport.name == "dynamo"
    [completion] = await policy.generate(PROMPT)
    assert completion.worker == dynamo.workers[0]["instance_id"]
    assert [span.version for span in completion.versions] == ["default"]
    assert completion.logprob_mode == "processed"


@pytest.mark.failure_mode("F44")
async def test_three_turns_are_append_only_and_score_again_bit_for_bit(
    policy: lockstep.Policy,
) -> None:
    chat = policy.chat(system="You reverse numbers.")
    for question in ("Reverse: 40213", "And 771", "Once more: 9"):
        await chat.send(question)
    [sample] = chat.samples()
    assert sum(sample.sampled_mask) > 0
    assert not sample.breaks
    scores = await policy.score(sample.token_ids)
    trainer = [0.0, *reference(TINY, sample.token_ids)]
    for at, sampled in enumerate(sample.sampled_mask):
        if sampled:
            assert sample.logprobs[at] == scores.logprobs[at] == trainer[at]


@pytest.mark.failure_mode("F46")
async def test_teacher_scores_are_the_trainers(policy: lockstep.Policy) -> None:
    ids = [(7 * at) % 500 for at in range(1, 120)]
    scores = await policy.score(ids)
    assert scores.logprobs[1:] == reference(TINY, ids)
    warm = await policy.score(ids, temperature=0.7)
    assert warm.logprobs[1:] == reference(TINY, ids, 0.7)
    assert warm.temperature == 0.7


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
async def test_numbers_that_dynamo_cuts_to_32_bits_arrive_whole(
    policy: lockstep.Policy, temperature: float
) -> None:
    [completion] = await policy.generate(PROMPT, temperature=temperature, ignore_eos=True)
    assert completion.temperature == temperature
    ids = PROMPT + completion.token_ids
    assert completion.logprobs == reference(TINY, ids, temperature)[len(PROMPT) - 1 :]


async def test_a_stream_is_the_unary_answer_in_a_few_chunks(policy: lockstep.Policy) -> None:
    options = {"max_tokens": 400, "ignore_eos": True, "logprobs": 2, "prompt_logprobs": 1}
    [whole] = await policy.generate(PROMPT, **options)
    items = [item async for item in policy.stream(PROMPT, **options)]
    deltas = [item for item in items if isinstance(item, StreamDelta) and item.token_ids]
    [last] = [item for item in items if isinstance(item, Completion)]
    assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
    for field in ("token_ids", "logprobs", "finish", "versions", "top_logprobs", "prompt_logprobs"):
        assert getattr(last, field) == getattr(whole, field)
    assert len(deltas) < 200, "tokens are sent together, not one by one"


async def test_many_choices_have_their_own_records(policy: lockstep.Policy) -> None:
    choices = await policy.generate(PROMPT, n=3, ignore_eos=True)
    assert [completion.index for completion in choices] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in choices}) == 3


async def test_stop_ids_end_a_turn_and_are_kept(policy: lockstep.Policy) -> None:
    letters = {"allowed_token_ids": list(range(100, 200))}  # none of them is an end
    [free] = await policy.generate(PROMPT, **letters)
    stop = free.token_ids[5]
    [completion] = await policy.generate(PROMPT, **letters, stop_token_ids=[stop])
    assert set(free.token_ids) <= set(range(100, 200))
    assert completion.finish == "stop"
    assert completion.stop_token == stop
    assert completion.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    with pytest.raises(UnsupportedField, match="drops every stop token"):
        await policy.generate(PROMPT, ignore_eos=True, stop_token_ids=[stop])


@pytest.mark.failure_mode("F12")
async def test_an_abort_is_an_abort_and_goes_on_token_exactly(
    dynamo: Deployment, policy: lockstep.Policy
) -> None:
    [whole] = await policy.generate(PROMPT, temperature=0.0, **LONG)
    running = asyncio.create_task(policy.generate(PROMPT, temperature=0.0, **LONG))
    await in_flight(dynamo, 1)
    admin = await dynamo.admin()
    await admin.pause("abort")
    [part] = await running
    await admin.resume()
    await admin.close()
    assert part.finish == "abort"
    assert part.token_ids == whole.token_ids[: len(part.token_ids)]
    left = LONG["max_tokens"] - len(part.token_ids)
    rest_of = {**LONG, "max_tokens": left}
    [rest] = await policy.generate(PROMPT + part.token_ids, temperature=0.0, **rest_of)
    assert part.token_ids + rest.token_ids == whole.token_ids
    assert part.logprobs + rest.logprobs == whole.logprobs


@pytest.mark.failure_mode("F47")
async def test_a_client_that_goes_away_stops_the_engine(
    dynamo: Deployment, policy: lockstep.Policy
) -> None:
    running = asyncio.create_task(policy.generate(PROMPT, **LONG))
    await in_flight(dynamo, 1)
    running.cancel()
    await in_flight(dynamo, 0)


@pytest.mark.failure_mode("F18")
async def test_bad_input_is_refused(policy: lockstep.Policy) -> None:
    with pytest.raises(BadRequest):
        await policy.generate([10, 5000])
    with pytest.raises(BadRequest, match=r"stop_token_ids\[0\] is 7000"):
        await policy.generate(PROMPT, stop_token_ids=[7000])
    with pytest.raises(PromptTooLong):
        await policy.generate([10] * 4096)
    with pytest.raises(BadRequest, match="this model has none"):
        await policy.generate(PROMPT, experts_start=0)
    with pytest.raises(UnknownModel):
        await policy.transport.generate(GenerateRequest(prompt_ids=PROMPT, model="nobody"))


@pytest.mark.failure_mode("F14")
async def test_stop_strings_are_refused_by_client_and_worker(
    dynamo: Deployment, policy: lockstep.Policy
) -> None:
    with pytest.raises(UnsupportedField, match="stop_token_ids"):
        await policy.transport.generate(
            GenerateRequest(prompt_ids=PROMPT, model="tiny", sampling=Sampling(stop=("a",)))
        )
    link = policy.transport._http  # type: ignore[attr-defined]
    body = b"""{"model":"tiny","messages":[{"role":"user","content":"x"}],"stop":["a"],
               "nvext":{"token_data":[10,20],"extra_fields":["engine_data"]}}"""
    with pytest.raises(BadRequest, match="loses engine_data"):
        await link.post("/v1/chat/completions", body)


async def test_the_generate_route_gives_the_same_tokens(
    dynamo: Deployment, policy: lockstep.Policy
) -> None:
    options = {"temperature": 0.7, "stop_token_ids": [505, 503], "top_k": 20}
    async with lockstep.connect(
        dynamo.url, model="tiny", transport="dynamo-generate", max_tokens=48, seed=5
    ) as other:
        [one] = await policy.generate(PROMPT, **options)
        [two] = await other.generate(PROMPT, **options)
        assert (one.token_ids, one.logprobs) == (two.token_ids, two.logprobs)
        assert one.finish == two.finish
        running = asyncio.create_task(other.generate(PROMPT, **LONG))
        await in_flight(dynamo, 1)
        admin = await dynamo.admin()
        await admin.pause("abort")
        with pytest.raises(EngineFailure):  # the route would call it a stop
            await running
        await admin.resume()
        await admin.close()
