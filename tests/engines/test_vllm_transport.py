"""Tokens in and out of a real vLLM server, through Lockstep's transport and client."""

from __future__ import annotations

import asyncio
import re
from itertools import pairwise

import pytest

import lockstep
from lockstep.backends.transport import GenerateRequest, StreamDelta
from lockstep.backends.vllm.transport import VllmTransport
from lockstep.http.client.client import HttpClient
from lockstep.render import Renderer
from lockstep.tokens import Completion, Sampling
from lockstep.tokens.errors import BadTokenId, EngineFailure, PromptTooLong
from lockstep.tokens.grammar import Grammar
from tests.engines.vllm_load import begun
from tests.engines.vllm_models import TOLERANCE, Reference
from tests.engines.vllm_servers import Vllm, updated

pytestmark = pytest.mark.timeout(400)
PROMPT = [7, 100, 23, 400, 9, 311, 42, 5]


async def one(server: Vllm, prompt: list[int] = PROMPT, **options: object) -> Completion:
    async with server.transport() as transport:
        (completion,) = await transport.generate(request_of(prompt, **options))
        return completion


def request_of(prompt: list[int] = PROMPT, **options: object) -> GenerateRequest:
    request_id = options.pop("request_id", None)
    return GenerateRequest(
        prompt_ids=prompt, sampling=Sampling(**options), request_id=request_id, timeout=120
    )  # type: ignore[arg-type]


async def test_a_stream_gives_what_one_answer_gives(dense: Vllm) -> None:
    options = {"max_tokens": 24, "temperature": 1.0, "seed": 5, "logprobs": 3, "ignore_eos": True}
    whole = await one(dense, **options)
    async with dense.transport() as transport:
        items = [item async for item in transport.stream(request_of(**options))]
    deltas = [item for item in items if isinstance(item, StreamDelta)]
    (completion,) = [item for item in items if isinstance(item, Completion)]
    assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
    assert (completion.token_ids, completion.logprobs) == (whole.token_ids, whole.logprobs)
    assert (completion.top_logprobs, completion.versions) == (whole.top_logprobs, whole.versions)
    assert (completion.finish, len(deltas) > 1) == ("length", True)


@pytest.mark.failure_mode("F11")
async def test_each_of_n_answers_has_its_own_tokens(dense: Vllm) -> None:
    async with dense.transport() as transport:
        sampled = request_of(n=3, max_tokens=12, logprobs=0, seed=3, ignore_eos=True)
        choices = await transport.generate(sampled)
    assert [completion.index for completion in choices] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in choices}) == 3
    async with dense.admin() as admin:
        await updated(dense, admin, dense.a, "n")
    known = Reference(dense.a)
    for completion in choices:
        right = known.score([*PROMPT, *completion.token_ids])[len(PROMPT) - 1 :]
        worst = max(abs(p - q) for p, q in zip(completion.logprobs, right, strict=True))
        assert worst <= TOLERANCE


async def test_logprobs_are_the_models_own_at_any_temperature(dense: Vllm) -> None:
    async with dense.admin() as admin:
        await updated(dense, admin, dense.a, "temperature")
    completion = await one(dense, max_tokens=16, temperature=2.0, logprobs=2, ignore_eos=True)
    right = Reference(dense.a).score([*PROMPT, *completion.token_ids])[len(PROMPT) - 1 :]
    assert max(abs(p - q) for p, q in zip(completion.logprobs, right, strict=True)) <= TOLERANCE
    assert completion.logprob_mode == "raw"


@pytest.mark.failure_mode("F46")
async def test_a_teacher_scores_every_token_of_a_prompt(dense: Vllm) -> None:
    async with dense.admin() as admin:
        await updated(dense, admin, dense.a, "teacher")
    ids = [(17 * at) % 500 for at in range(300)]  # more than two blocks of the cache
    async with lockstep.connect(dense.url, tokenizer=dense.a) as policy:
        scores = await policy.score(ids)
        again = await policy.score(ids)
    right = Reference(dense.a).score(ids)
    assert scores.logprobs[0] == 0.0  # nothing comes before it
    assert max(abs(p - q) for p, q in zip(scores.logprobs[1:], right, strict=True)) <= TOLERANCE
    assert (scores.version, again.logprobs) == ("teacher", scores.logprobs)


async def test_a_stop_token_ends_the_answer_and_is_part_of_it(dense: Vllm) -> None:
    free = await one(dense, temperature=0.0, max_tokens=8, logprobs=0, ignore_eos=True)
    stop = free.token_ids[3]
    cut = free.token_ids[: free.token_ids.index(stop) + 1]
    completion = await one(
        dense, temperature=0.0, max_tokens=8, stop_token_ids=(stop,), ignore_eos=True
    )
    assert (completion.token_ids, completion.finish, completion.stop_token) == (cut, "stop", stop)


@pytest.mark.failure_mode("F66")
async def test_a_stop_string_ends_the_answer_and_its_tokens_stay(dense: Vllm) -> None:
    options = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    pieces = Renderer.load(dense.a).pieces
    free = await one(dense, **options)
    text = pieces.decode(free.token_ids[:6])
    stop = text[len(text) // 2 :][:3]
    completion = await one(dense, stop=(stop,), **options)
    count = len(completion.token_ids)
    assert completion.token_ids == free.token_ids[:count]
    assert (completion.finish, completion.stop_reason) == ("stop", stop)
    assert stop in pieces.decode(completion.token_ids)
    assert len(completion.logprobs) == count


@pytest.mark.failure_mode("F67")
async def test_grammars_and_penalties_reach_the_engine(dense: Vllm) -> None:
    pieces = Renderer.load(dense.a).pieces
    held = await one(dense, grammar=Grammar("regex", "[a-c]{4}"), max_tokens=12, seed=1)
    text = "".join(pieces.piece(token).text for token in held.token_ids[:4])
    assert re.match("[a-c]{1,4}", text)
    assert held.shaping is not None
    assert held.shaping.grammar == Grammar("regex", "[a-c]{4}")
    free = await one(dense, temperature=0.0, max_tokens=24, ignore_eos=True)
    kept = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, "repetition_penalty": 50.0}
    penalized = await one(dense, **kept)
    assert len(set(penalized.token_ids)) > len(set(free.token_ids))


async def aborted(dense: Vllm, prefix: str, name: str) -> Completion:
    """A long completion whose abort is sent, with `prefix` before its id, until it ends."""
    async with dense.transport() as transport:
        long = request_of(max_tokens=900, ignore_eos=True, request_id=name)
        running = await begun(dense, long)
        # vLLM does not tell whether an abort met its request, and one right after the first token
        # may miss it.
        while not running.done():
            await transport.abort(f"{prefix}{name}")
            await asyncio.wait((running,), timeout=0.03)
        return await running


@pytest.mark.failure_mode("F12")
@pytest.mark.parametrize("prefix", ["", "generate-tokens-"])
async def test_an_abort_by_id_keeps_the_partial_tokens(dense: Vllm, prefix: str) -> None:
    # At full speed 900 tokens take a second, in which a busy machine may carry no abort.
    async with dense.slowed(0.03):
        completion = await aborted(dense, prefix, f"victim{prefix}")
    assert completion.finish == "abort"
    assert 0 < len(completion.token_ids) == len(completion.logprobs) < 900


async def test_a_connection_dropped_after_a_500_is_not_noticed(dense: Vllm) -> None:
    link = HttpClient(dense.url, connections=1)
    transport = VllmTransport(link)
    try:
        for _ in range(3):
            with pytest.raises(EngineFailure, match="no attribute 'nope'"):
                await link.post("/collective_rpc", b'{"method": "nope"}')
            (completion,) = await transport.generate(request_of(max_tokens=2, ignore_eos=True))
            assert len(completion.token_ids) == 2
    finally:
        await transport.close()


async def test_bad_input_is_refused_with_its_name(dense: Vllm) -> None:
    with pytest.raises(PromptTooLong, match="1024"):
        await one(dense, [5] * 1024, max_tokens=1)
    with pytest.raises(BadTokenId):
        await one(dense, [5, 5000], max_tokens=1)
    with pytest.raises(BadTokenId, match="-3"):
        request_of([5, -3])


async def test_a_conversation_is_token_exact_over_three_turns(dense: Vllm) -> None:
    async with dense.admin() as admin:
        await updated(dense, admin, dense.a, "chat")
    async with lockstep.connect(dense.url, tokenizer=dense.a, max_tokens=20) as policy:
        chat = policy.chat(system="You reverse strings.")
        turns = [await chat.send(text) for text in ("Reverse: 40213", "And 77?", "Thanks")]
        sample = chat.sample()
    for before, after in pairwise(turns):
        whole = [*before.prompt_ids, *before.token_ids]
        assert after.prompt_ids[: len(whole)] == whole
    assert sample.token_ids == [*turns[-1].prompt_ids, *turns[-1].token_ids]
    assert sum(sample.sampled_mask) == sum(len(turn.token_ids) for turn in turns)
    right = Reference(dense.a).score(sample.token_ids)
    for at, sampled in enumerate(sample.sampled_mask):
        if sampled:
            assert abs(sample.logprobs[at] - right[at - 1]) <= TOLERANCE
    assert {span.version for span in sample.versions} == {"chat"}
