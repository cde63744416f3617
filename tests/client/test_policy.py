"""Single calls, scores and many prompts at once, over a real worker."""

from __future__ import annotations

import asyncio
import math
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import lockstep
from lockstep.client import Turn
from lockstep.client.tokenizer import TokenizerSource
from lockstep.models import bundled
from lockstep.tokens import Completion, errors
from tests.processes import WorkerProcess

IDS = [11, 29, 3, 77, 5, 140, 9]


async def test_ids_give_completions_and_messages_give_turns(policy: lockstep.Policy) -> None:
    (completion,) = await policy.generate(IDS, max_tokens=4, ignore_eos=True)
    assert isinstance(completion, Completion)
    assert len(completion.token_ids) == 4
    assert completion.prompt_ids == IDS
    (turn,) = await policy.generate([{"role": "user", "content": "Reverse: 12"}])
    assert isinstance(turn, Turn)
    assert turn.text
    (same,) = await policy.generate("Reverse: 12")
    assert same.prompt_ids == turn.prompt_ids


@pytest.mark.exact_arithmetic
@pytest.mark.failure_mode("F11")
async def test_n_choices_come_in_order_and_each_with_its_own(policy: lockstep.Policy) -> None:
    turns = await policy.generate("Reverse: 40213", n=4, seed=1)
    assert [turn.completion.index for turn in turns] == [0, 1, 2, 3]
    for turn in turns:
        scores = await policy.score(turn.prompt_ids + turn.token_ids)
        assert scores.logprobs[len(turn.prompt_ids) :] == turn.logprobs


@pytest.mark.failure_mode("F44")
async def test_a_stream_ends_with_the_completion_that_generate_gives(
    policy: lockstep.Policy,
) -> None:
    options = {"max_tokens": 12, "seed": 5, "logprobs": 2, "ignore_eos": True, "request_id": "same"}
    whole = await policy.generate(IDS, **options)
    events = [event async for event in policy.stream(IDS, **options)]
    deltas = [event for event in events if not isinstance(event, Completion)]
    assert [event for event in events if isinstance(event, Completion)] == whole
    assert [t for delta in deltas for t in delta.token_ids] == whole[0].token_ids
    assert [v for delta in deltas for v in delta.logprobs] == whole[0].logprobs


@pytest.mark.exact_arithmetic
@pytest.mark.failure_mode("F46")
async def test_scores_say_their_temperature_and_version(policy: lockstep.Policy) -> None:
    plain = await policy.score(IDS)
    assert (plain.logprobs[0], plain.temperature, plain.version) == (0.0, 1.0, "default")
    assert len(plain.logprobs) == len(IDS)
    warm = await policy.score(IDS, temperature=2.0)
    assert warm.temperature == 2.0
    assert warm.logprobs != plain.logprobs
    (completion,) = await policy.generate(
        IDS, temperature=2.0, logprob_mode="processed", max_tokens=20, ignore_eos=True
    )
    again = await policy.score(IDS + completion.token_ids, temperature=2.0)
    assert again.logprobs[len(IDS) :] == completion.logprobs
    with pytest.raises(errors.BadRequest):
        await policy.score([5])


@pytest.mark.exact_arithmetic
async def test_a_sample_that_fills_the_context_is_scored(policy: lockstep.Policy) -> None:
    (card,) = await policy.models()
    assert card.max_model_len is not None
    prompt = [71] * (card.max_model_len - 20)
    (completion,) = await policy.generate(prompt, max_tokens=64, ignore_eos=True)
    whole = prompt + completion.token_ids
    assert (len(whole), completion.finish) == (card.max_model_len, "length")
    scores = await policy.score(whole)
    assert scores.logprobs[len(prompt) :] == completion.logprobs
    with pytest.raises(errors.PromptTooLong):
        await policy.score([*whole, 5])


@pytest.mark.exact_arithmetic
@pytest.mark.failure_mode("F71")
async def test_sampled_tokens_score_again_with_every_option_they_were_sampled_with(
    policy: lockstep.Policy,
) -> None:
    options: dict[str, Any] = {
        "temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "presence_penalty": 0.4,
        "frequency_penalty": 0.3, "repetition_penalty": 1.2, "logit_bias": {70: 2.0},
    }  # fmt: skip
    (completion,) = await policy.generate(IDS, max_tokens=20, ignore_eos=True, seed=8, **options)
    assert completion.logprob_mode == "processed"
    assert completion.shaping is not None
    whole = IDS + completion.token_ids
    scores = await policy.score(whole, start=len(IDS), **options)
    assert scores.logprobs[len(IDS) :] == completion.logprobs
    plain = await policy.score(whole)
    assert plain.logprobs[len(IDS) :] != completion.logprobs
    with pytest.raises(errors.BadLogprob, match="position"):
        await policy.score([*IDS, 3, 4, 5], start=len(IDS), top_k=1)
    kept = await policy.score([*IDS, 3, 4, 5], start=len(IDS), top_k=1, allow_nonfinite=True)
    assert kept.logprobs[-1] == -math.inf


@pytest.mark.failure_mode("F16")
@pytest.mark.failure_mode("F53")
async def test_turns_of_different_temperature_make_no_sample(policy: lockstep.Policy) -> None:
    strict = policy.chat(temperature=1.0)
    await strict.send("Reverse: 12")
    before = list(strict.messages)
    with pytest.raises(errors.Conflict, match="temperature"):
        await strict.send("Reverse: 34", temperature=0.5)
    assert strict.messages == before
    chat = policy.chat(temperature=1.0, breaks="fork")
    await chat.send("Reverse: 12")
    await chat.send("Reverse: 34", temperature=0.5)
    with pytest.raises(errors.Conflict, match="temperature"):
        chat.sample()
    assert [sample.temperature for sample in chat.samples()] == [1.0, 0.5]


@pytest.mark.exact_arithmetic
async def test_map_keeps_the_order_and_bounds_concurrency(policy: lockstep.Policy) -> None:
    prompts = [f"Reverse: {number}" for number in range(100, 140)]
    results = await policy.map(prompts, concurrency=8, temperature=0.0, progress=True)
    for prompt, (turn,) in zip(prompts, results, strict=True):
        (alone,) = await policy.generate(prompt, temperature=0.0)
        assert (turn.token_ids, turn.logprobs) == (alone.token_ids, alone.logprobs)


async def test_map_raises_the_first_error_or_keeps_it(policy: lockstep.Policy) -> None:
    prompts = ["Reverse: 1", [5] * 5000, "Reverse: 2"]
    with pytest.raises(errors.PromptTooLong):
        await policy.map(prompts)
    first, bad, last = await policy.map(prompts, keep_errors=True)
    assert isinstance(bad, errors.PromptTooLong)
    assert first[0].text
    assert last[0].text


async def test_a_version_floor_is_the_servers_to_keep(policy: lockstep.Policy) -> None:
    with pytest.raises(errors.VersionUnavailable):
        await policy.generate(IDS, min_weight_version="step-9")
    (completion,) = await policy.generate(IDS, min_weight_version="default", max_tokens=1)
    assert completion.versions[0].version == "default"


async def test_unknown_options_and_models_are_named(
    policy: lockstep.Policy, worker: WorkerProcess
) -> None:
    with pytest.raises(errors.BadRequest, match="temprature"):
        await policy.generate(IDS, temprature=1.0)
    with pytest.raises(errors.UnknownModel, match="nope"):
        await lockstep.generate(worker.url, IDS, model="nope")
    with pytest.raises(errors.Unavailable):
        await lockstep.generate("http://127.0.0.1:9", IDS, retries=0)


async def test_the_sync_facade_works_beside_a_running_loop(worker: WorkerProcess) -> None:
    def use() -> tuple[str, int, float]:
        with lockstep.connect_sync(worker.url, max_tokens=16) as policy:
            chat = policy.chat()
            turn = chat.send("Reverse: 40213")
            assert chat.send("Reverse: 12").bridged
            scores = policy.score(chat.sample().token_ids)
            (completion,) = policy.generate(IDS, max_tokens=1)
            assert [card.id for card in policy.models()] == ["tiny"]
            assert len(policy.map(["Reverse: 1", "Reverse: 2"])) == 2
            return turn.text, len(completion.token_ids), scores.logprobs[0]

    text, count, first = await asyncio.to_thread(use)
    assert (bool(text), count, first) == (True, 1, 0.0)


async def test_a_connection_that_was_not_opened_says_how(worker: WorkerProcess) -> None:
    connection = lockstep.connect(worker.url)
    with pytest.raises(AttributeError, match=r"'generate' before.*async with lockstep.connect"):
        connection.generate("Reverse: 12")
    with pytest.raises(TypeError, match=r"not awaited.*with lockstep.connect_sync"):
        await connection


def test_a_sync_connection_that_is_refused_leaves_no_thread(worker: WorkerProcess) -> None:
    before = threading.active_count()
    with pytest.raises(errors.BadRequest, match="colour"):
        lockstep.connect_sync(worker.url, colour="red")
    assert threading.active_count() == before


async def test_one_call_without_a_connection_at_hand(worker: WorkerProcess) -> None:
    (turn,) = await lockstep.generate(worker.url, "Reverse: 12", max_tokens=8)
    assert turn.text


# The tokenizer


class Loads:
    """A tokenizer that nobody has loaded yet, and takes its time: how often, and in which threads,
    it was loaded."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = directory / "tokenizer"
        shutil.copytree(bundled("tiny") or Path(), self.path)
        self.count = 0
        self.threads: set[int] = set()
        load = AutoTokenizer.from_pretrained

        def slow(*args: Any, **options: Any) -> Any:
            self.count += 1
            self.threads.add(threading.get_ident())
            time.sleep(0.5)
            return load(*args, **options)

        monkeypatch.setattr(AutoTokenizer, "from_pretrained", slow)


@pytest.fixture
def loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loads:
    return Loads(tmp_path, monkeypatch)


async def test_many_prompts_at_once_load_the_tokenizer_once(
    worker: WorkerProcess, loads: Loads
) -> None:
    async with lockstep.connect(worker.url, "tiny", tokenizer=loads.path, max_tokens=2) as policy:
        await policy.map([f"Reverse: {number}" for number in range(40)], concurrency=40)
        await policy.chat().send("Reverse: 12")
    assert loads.count == 1
    assert threading.get_ident() not in loads.threads


async def test_the_server_refuses_a_wrong_model_and_nobody_looks_for_it_elsewhere(
    worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", None)  # whoever asks the Hub fails
    async with lockstep.connect(worker.url, "gpt") as policy:
        with pytest.raises(errors.UnknownModel, match="'gpt' does not exist; served are tiny"):
            await policy.generate("Reverse: 12", max_tokens=2)


async def test_a_conversation_loads_the_tokenizer_off_the_event_loop(
    worker: WorkerProcess, loads: Loads
) -> None:
    async with lockstep.connect(worker.url, "tiny", tokenizer=loads.path, max_tokens=2) as policy:
        chats = [policy.chat(seed=seed) for seed in range(8)]
        assert chats[0].samples() == []
        assert loads.count == 0
        sending = [asyncio.create_task(chat.send("Reverse: 12")) for chat in chats]
        await asyncio.sleep(0.1)
        sending[0].cancel()  # it began the load that the others wait for
        await asyncio.gather(*sending[1:])
    assert loads.count == 1
    assert threading.get_ident() not in loads.threads


async def test_a_tokenizer_that_is_not_there_is_said_by_the_first_turn_and_looked_for_again(
    worker: WorkerProcess, loads: Loads
) -> None:
    away = loads.path.rename(loads.path.with_name("away"))
    async with lockstep.connect(worker.url, "tiny", tokenizer=loads.path, max_tokens=2) as policy:
        chat = policy.chat()
        with pytest.raises(errors.UnknownModel, match="no tokenizer at"):
            await chat.send("Reverse: 12")
        assert chat.messages == []
        away.rename(loads.path)
        assert (await chat.send("Reverse: 12")).token_ids


async def test_one_who_goes_away_does_not_cancel_a_load_that_has_not_begun(loads: Loads) -> None:
    source = TokenizerSource(loads.path)
    first = asyncio.create_task(source.get_async("keep"))
    queued = [asyncio.create_task(source.get_async("template")) for _ in range(2)]
    await asyncio.sleep(0.1)
    queued[0].cancel()
    assert (await first).thinking == "keep"
    assert (await queued[1]).thinking == "template"
