"""The data port over real HTTP: vLLM's dialect, checked strictly."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import msgspec
import pytest

from lockstep.engine import exact
from lockstep.models import bundled
from lockstep.tokens.numerics import NumericsPlan
from lockstep.tokens.support import PackedSupport
from tests.processes import GENERATE, WorkerProcess

PROMPT = [11, 29, 3, 77, 5, 140, 9]


async def test_a_response_has_every_field_of_vllm(worker: WorkerProcess) -> None:
    status, body = await worker.generate(
        PROMPT,
        temperature=0,
        max_tokens=3,
        logprobs=1,
        ignore_eos=True,
        request_id="my-req-1",
        model="tiny",
    )
    assert status == 200
    assert body["request_id"] == "generate-tokens-my-req-1"
    assert body["usage"]["prompt_tokens"] == len(PROMPT)
    assert body["usage"]["completion_tokens"] == 3
    vllm = {"request_id", "model", "created", "usage", "prompt_logprobs", "prompt_token_ids",
            "prompt_token_id_logprobs", "mm_placeholders", "metrics", "kv_transfer_params",
            "ec_transfer_params", "output_mode", "choices"}  # fmt: skip
    assert vllm <= set(body)
    (choice,) = body["choices"]
    assert {"index", "finish_reason", "stop_reason", "token_ids", "routed_experts",
            "sampling_mask", "weight_versions", "logprobs"} == set(choice)  # fmt: skip
    assert choice["finish_reason"] == "length"
    assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": 3}]


@pytest.mark.failure_mode("F07")
async def test_each_entry_names_its_token_in_both_spellings(worker: WorkerProcess) -> None:
    _, body = await worker.generate(PROMPT, max_tokens=8, logprobs=3, seed=4)
    (choice,) = body["choices"]
    for token, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
        assert entry["token_id"] == token
        assert entry["token"] == f"token_id:{token}"
        assert entry["top_logprobs"][0]["token_id"] == token
        assert len(entry["top_logprobs"]) in (3, 4)
        ranks = [top["rank"] for top in entry["top_logprobs"][1:]]
        assert ranks == sorted(ranks)


@pytest.mark.failure_mode("F71")
async def test_logprobs_are_processed_by_default_and_labelled(worker: WorkerProcess) -> None:
    options = {"max_tokens": 4, "seed": 4, "logprobs": 0, "temperature": 0.5}
    _, processed = await worker.generate(PROMPT, **options)
    _, raw = await worker.generate(PROMPT, **options, logprob_mode="raw")
    assert (processed["logprob_mode"], raw["logprob_mode"]) == ("processed", "raw")
    assert "shaping" not in processed
    ids = [body["choices"][0]["token_ids"] for body in (processed, raw)]
    assert ids[0] == ids[1]
    assert processed["choices"][0]["logprobs"] != raw["choices"][0]["logprobs"]
    _, models = await worker.get("/v1/models")
    assert models["data"][0]["logprob_mode"] == "processed"


@pytest.mark.failure_mode("F100")
async def test_truncated_draws_have_their_sets_in_vllms_form(worker: WorkerProcess) -> None:
    options = {"max_tokens": 6, "seed": 4, "top_k": 5, "top_p": 0.9, "ignore_eos": True}
    _, body = await worker.generate(PROMPT, logprobs=8, **options)
    (choice,) = body["choices"]
    assert len(choice["sampling_mask"]) == 6
    tops = [entry["top_logprobs"] for entry in choice["logprobs"]["content"]]
    for token, own, top in zip(choice["token_ids"], choice["sampling_mask"], tops, strict=True):
        assert token in own
        assert own == sorted({entry["token_id"] for entry in top})
    body_fields = {"return_sampling_mask": True, "sampling_mask_format": "packed"}
    _, packed = await worker.generate(PROMPT, **options, **body_fields)
    support = msgspec.convert(packed["choices"][0]["sampling_mask"], PackedSupport).value()
    assert support.lists() == choice["sampling_mask"]
    events = await worker.events(PROMPT, logprobs=0, **options)
    masks = [event["choices"][0]["sampling_mask"] for event in events]
    assert [row for rows in masks if rows for row in rows] == choice["sampling_mask"]


@pytest.mark.failure_mode("F100")
@pytest.mark.parametrize(
    ("options", "recorded"),
    [
        ({"logprobs": 0, "top_p": 0.5}, True),
        ({"logprobs": 0, "top_p": 0.5, "return_sampling_mask": False}, False),
        ({"logprobs": 0, "top_p": 0.5, "logprob_mode": "raw"}, False),
        ({"top_p": 0.5}, False),
        ({"logprobs": 0, "return_sampling_mask": True}, False),
        ({"logprobs": 0, "allowed_token_ids": [5, 9]}, False),
        ({"allowed_token_ids": [5, 9], "return_sampling_mask": True}, True),
    ],
    ids=str,
)
async def test_sets_come_where_logprobs_need_them(
    worker: WorkerProcess, options: dict[str, Any], recorded: bool
) -> None:
    _, body = await worker.generate(PROMPT, max_tokens=2, seed=1, **options)
    assert (body["choices"][0]["sampling_mask"] is not None) is recorded


@pytest.mark.failure_mode("F66")
async def test_a_stop_string_ends_a_choice_and_its_tokens_stay(worker: WorkerProcess) -> None:
    options = {"max_tokens": 60, "seed": 5, "logprobs": 0, "ignore_eos": True}
    _, free = await worker.generate(PROMPT, **options)
    stops = ["7", "9", " the"]
    _, body = await worker.generate(PROMPT, **options, stop=stops, top_p=0.9)
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] in stops
    assert 0 < len(choice["token_ids"]) < 60
    assert choice["stop_tokens"] == 1
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    assert body["shaping"]["top_p"] == 0.9
    assert "stop_tokens" not in free["choices"][0]


async def test_logprobs_are_returned_only_on_request(worker: WorkerProcess) -> None:
    _, body = await worker.generate(PROMPT, max_tokens=2)
    assert body["choices"][0]["logprobs"] is None
    _, body = await worker.generate(PROMPT, max_tokens=2, logprobs=0)
    assert len(body["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 1


@pytest.mark.failure_mode("F11")
async def test_each_choice_has_its_own_ids_and_logprobs(worker: WorkerProcess) -> None:
    _, body = await worker.generate(PROMPT, max_tokens=6, n=3, seed=1, logprobs=0, ignore_eos=True)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert len({tuple(choice["token_ids"]) for choice in body["choices"]}) == 3
    for choice in body["choices"]:
        named = [entry["token_id"] for entry in choice["logprobs"]["content"]]
        assert named == choice["token_ids"]
    assert body["usage"]["completion_tokens"] == 18


@pytest.mark.failure_mode("F44")
async def test_a_stream_equals_the_whole_response(worker: WorkerProcess) -> None:
    options = {
        "ignore_eos": True,
        "max_tokens": 12,
        "n": 2,
        "seed": 9,
        "logprobs": 2,
        "temperature": 0.8,
    }
    _, whole = await worker.generate(PROMPT, **options)
    events = await worker.events(
        PROMPT, **options, stream_options={"include_usage": True}, return_token_ids=True
    )
    assert events[0]["prompt_token_ids"] == PROMPT
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        parts = [
            part
            for event in events
            for part in event["choices"]
            if part["index"] == choice["index"]
        ]
        assert sum((part["token_ids"] for part in parts), []) == choice["token_ids"]
        content = sum((part["logprobs"]["content"] for part in parts), [])
        assert content == choice["logprobs"]["content"]
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert parts[-1]["weight_versions"] == choice["weight_versions"]


@pytest.mark.failure_mode("F46")
async def test_prompt_logprobs_are_those_of_the_prompt_tokens(worker: WorkerProcess) -> None:
    _, body = await worker.generate(PROMPT, max_tokens=1, prompt_logprobs=1)
    first, *rest = body["prompt_logprobs"]
    assert first is None
    for token, entry in zip(PROMPT[1:], rest, strict=True):
        assert next(iter(entry)) == str(token)
        assert min(e["rank"] for e in entry.values()) == 1


@pytest.mark.exact_arithmetic
@pytest.mark.failure_mode("F44")
async def test_sampled_logprobs_score_again_bit_for_bit(worker: WorkerProcess) -> None:
    _, body = await worker.generate(PROMPT, max_tokens=40, logprobs=0, seed=2, ignore_eos=True)
    (choice,) = body["choices"]
    sampled = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    _, again = await worker.generate(PROMPT + choice["token_ids"], max_tokens=1, prompt_logprobs=0)
    scored = [next(iter(e.values()))["logprob"] for e in again["prompt_logprobs"][len(PROMPT) :]]
    assert scored == sampled


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"token_ids": [], "sampling_params": {}}, "token_ids"),
        ({"token_ids": [1.0], "sampling_params": {}}, "token_ids[0]"),
        ({"token_ids": [1, "2"], "sampling_params": {}}, "token_ids[1]"),
        ({"token_ids": [1, True], "sampling_params": {}}, "token_ids[1]"),
        ({"token_ids": [3, -1], "sampling_params": {}}, "token_ids[1]"),
        ({"token_ids": [3, 4, 512], "sampling_params": {}}, "token_ids[2]"),
        ({"token_ids": [10**30], "sampling_params": {}}, "token_ids[0]"),
        ({"token_ids": [1] * 1024, "sampling_params": {}}, "token_ids"),
        ({"token_ids": [1]}, "sampling_params"),
        ({"sampling_params": {}}, "token_ids"),
        ({"token_ids": [1], "sampling_params": {"max_tokens": 0}}, "max_tokens"),
        ({"token_ids": [1], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"token_ids": [1], "sampling_params": {"logprobs": 101}}, "logprobs"),
        ({"token_ids": [1], "sampling_params": {"logprobs": -1}}, "logprobs"),
        ({"token_ids": [1], "sampling_params": {"n": 0}}, "n"),
        ({"token_ids": [1], "sampling_params": {"top_k": -2}}, "top_k"),
        ({"token_ids": [1], "sampling_params": {"stop_token_ids": [600]}}, "stop_token_ids[0]"),
        ({"token_ids": [1], "sampling_params": {"topp": 1}}, "sampling_params.topp"),
        ({"token_ids": [1], "sampling_params": {}, "stremo": True}, "stremo"),
        ({"token_ids": [1], "sampling_params": {"presence_penalty": 3}}, "presence_penalty"),
        ({"token_ids": [1], "sampling_params": {"bad_words": ["x"]}}, "sampling_params.bad_words"),
        ({"token_ids": [1], "sampling_params": {}, "cache_salt": ""}, "cache_salt"),
        ({"token_ids": [1], "sampling_params": {}, "output_mode": "text"}, "output_mode"),
        ({"token_ids": [1], "sampling_params": {}, "return_routed_experts": True},
         "routed_experts_prompt_start"),
        ("{", "body"),
    ],
)  # fmt: skip
@pytest.mark.failure_mode("F18")
async def test_bad_input_is_rejected_by_name(
    worker: WorkerProcess, body: object, param: str
) -> None:
    for stream in (False, True):
        sent = {**body, "stream": stream} if isinstance(body, dict) else body
        status, response = await worker.post(GENERATE, sent)
        assert status == 400
        assert response["error"]["param"] == param
        assert response["error"]["code"] in (400, "context_length_exceeded")
        assert response["error"]["request_id"].startswith("generate-tokens-")


async def test_a_start_of_experts_has_no_effect_on_a_model_without_them(
    worker: WorkerProcess,
) -> None:
    # Stock clients send it with every bridged turn, whatever the model.
    options = {"max_tokens": 4, "seed": 3}
    _, plain = await worker.generate([1, 2, 3], **options)
    _, response = await worker.generate([1, 2, 3], **options, routed_experts_prompt_start=2)
    assert response["choices"] == plain["choices"]
    _, refused = await worker.generate([1, 2, 3], **options, routed_experts_prompt_start=4)
    assert refused["error"]["param"] == "sampling_params.routed_experts_prompt_start"


@pytest.mark.failure_mode("F17")
async def test_a_prompt_without_room_is_rejected_with_both_numbers(worker: WorkerProcess) -> None:
    _, response = await worker.generate([1] * 1500, max_tokens=1)
    assert "1500" in response["error"]["message"]
    assert "1024" in response["error"]["message"]


@pytest.mark.parametrize(
    "neutral",
    [{"top_k": -1}, {"presence_penalty": 0.0}, {"frequency_penalty": 0}, {"repetition_penalty": 1},
     {"stop": []}, {"stop": None}, {"bad_words": []}, {"detokenize": False}, {"logit_bias": None},
     {"skip_special_tokens": False}, {"structured_outputs": None}, {"min_tokens": 0}],
)  # fmt: skip
async def test_vllm_fields_at_their_neutral_value_are_accepted(
    worker: WorkerProcess, neutral: dict[str, object]
) -> None:
    status, _ = await worker.generate(PROMPT, max_tokens=1, **neutral)
    assert status == 200


async def test_other_content_types_routes_and_verbs_are_rejected(worker: WorkerProcess) -> None:
    status, body = await worker.post(GENERATE, "{}", headers={"content-type": "text/plain"})
    assert (status, body["error"]["type"]) == (400, "BadRequestError")
    status, body = await worker.get("/inference/v1/nope")
    assert (status, body["error"]["reason"]) == (404, "no_such_route")
    status, body = await worker.get(GENERATE)
    assert (status, body["error"]["reason"]) == (405, "method_not_allowed")


@pytest.mark.failure_mode("F31")
async def test_an_unknown_model_is_404(worker: WorkerProcess) -> None:
    status, body = await worker.generate(PROMPT, max_tokens=1, model="nope")
    assert status == 404
    assert "tiny" in body["error"]["message"]


async def test_the_header_overrides_the_request_id_of_the_body(worker: WorkerProcess) -> None:
    sent = {"token_ids": [1], "request_id": "body", "sampling_params": {"max_tokens": 1}}
    _, body = await worker.post(GENERATE, sent, headers={"X-Request-Id": "header"})
    assert body["request_id"] == "generate-tokens-header"


@pytest.mark.failure_mode("F45")
async def test_abort_by_id_returns_how_many_it_stopped(worker: WorkerProcess) -> None:
    await worker.control("pause_generation", mode="keep")
    twins = [
        asyncio.create_task(worker.generate(PROMPT, max_tokens=500, request_id="twin", logprobs=0))
        for _ in range(2)
    ]
    while (await worker.control("liveness_probe"))[1]["waiting"] < 2:
        await asyncio.sleep(0.01)
    _, body = await worker.post("/inference/v1/abort_requests", {"request_ids": ["nobody"]})
    assert body["aborted"] == 0
    _, body = await worker.post("/inference/v1/abort_requests", {"request_ids": ["twin"]})
    assert body["aborted"] == 2
    for status, response in await asyncio.gather(*twins):
        assert status == 200
        assert response["choices"][0]["finish_reason"] == "abort"
        assert response["choices"][0]["logprobs"] == {"content": []}
    status, _ = await worker.post("/inference/v1/abort_requests", {"request_ids": []})
    assert status == 400
    await worker.control("resume_generation")


@pytest.mark.failure_mode("F47")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnected_client_stops_its_request(worker: WorkerProcess, stream: bool) -> None:
    await worker.control("pause_generation", mode="keep")
    body = {"token_ids": PROMPT, "stream": stream, "sampling_params": {"max_tokens": 900}}
    async with aiohttp.ClientSession() as session:
        request = asyncio.create_task(session.post(worker.url + GENERATE, json=body))
        while not (await worker.control("liveness_probe"))[1]["waiting"]:
            await asyncio.sleep(0.01)
        if stream:
            (await request).close()
        else:
            request.cancel()
    async with asyncio.timeout(20):
        while (await worker.control("liveness_probe"))[1]["waiting"]:
            await asyncio.sleep(0.01)
    await worker.control("resume_generation")


async def test_models_health_and_metrics(worker: WorkerProcess) -> None:
    _, body = await worker.get("/v1/models")
    (card,) = body["data"]
    assert (card["id"], card["max_model_len"], card["parent"]) == ("tiny", 1024, None)
    status, health = await worker.get("/health")
    assert (status, health["version"]) == (200, "default")
    async with aiohttp.ClientSession() as session, session.get(worker.url + "/metrics") as response:
        text = await response.text()
    assert 'lockstep_worker_generated_tokens_total{model="tiny"}' in text
    assert 'version="default"' in text


@pytest.mark.failure_mode("F70")
@pytest.mark.exact_arithmetic
async def test_the_model_card_has_the_numerics_plan(worker: WorkerProcess) -> None:
    """A trainer in another environment could not compare its plan otherwise."""
    directory = bundled("tiny")
    assert directory is not None
    _, body = await worker.get("/v1/models")
    there = msgspec.convert(body["data"][0]["numerics"], NumericsPlan)
    exact.check_plan(there, exact.own_plan(directory))
    assert there == exact.own_plan(directory)


async def test_a_logprob_survives_json_bit_for_bit(worker: WorkerProcess) -> None:
    """An fp32 value written as a decimal and read back is the same value."""
    import struct

    _, body = await worker.generate(PROMPT, max_tokens=20, logprobs=0, seed=3)
    for entry in body["choices"][0]["logprobs"]["content"]:
        value = json.loads(json.dumps(entry["logprob"]))
        assert struct.unpack("f", struct.pack("f", value))[0] == value
