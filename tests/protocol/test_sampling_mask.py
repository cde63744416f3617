"""The support of sampled tokens in vLLM's responses: lists of ids, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.vllm.decode_generate import GenerateStreamDecoder, decode_generate
from lockstep.protocol.vllm.encode_generate import encode_lockstep, encode_vllm
from lockstep.tokens import Sampling
from lockstep.tokens.errors import BadSupport
from tests.protocol.responses import entry, generate_body, generate_choice, reading

pytestmark = pytest.mark.failure_mode("F100")
MASKS = [[3, 11], [12]]


def test_the_lists_of_a_whole_response_are_its_supports() -> None:
    body = generate_body(generate_choice(sampling_mask=MASKS))
    (completion,) = decode_generate(body, reading(sampling={"top_k": 2}))
    assert completion.support is not None
    assert completion.support.lists() == MASKS


def test_each_event_of_a_stream_brings_the_lists_of_its_tokens() -> None:
    decoder = GenerateStreamDecoder(reading(sampling={"top_k": 2}))
    for token, value, ids in ((11, -0.5, MASKS[0]), (12, -0.25, MASKS[1])):
        choice: dict[str, Any] = {"index": 0, "token_ids": [token], "sampling_mask": [ids]}
        choice |= {"logprobs": {"content": [entry(token, value)]}}
        if token == 12:
            choice |= {"finish_reason": "stop"}
            choice |= {"weight_versions": [{"version": "v1", "start": 0, "end": 2}]}
        decoder.feed(json.dumps({"choices": [choice]}).encode())
    (completion,) = decoder.finish()
    assert completion.support is not None
    assert completion.support.lists() == MASKS


@pytest.mark.parametrize(
    ("masks", "says"),
    [
        ([[3, 11]], "2 token ids but 1 sets"),
        ([[3, 11], [13]], "token 12 at position 1 is not in its own support of 1"),
        ([[11, 3], [12]], "not ascending"),
    ],
)
def test_lists_that_cannot_be_are_rejected(masks: list[list[int]], says: str) -> None:
    with pytest.raises(BadSupport, match=says):
        decode_generate(generate_body(generate_choice(sampling_mask=masks)), reading())


@pytest.mark.parametrize(
    ("options", "support", "expected"),
    [
        ({"top_p": 0.9}, None, True),
        ({"top_p": 0.9}, False, False),
        ({"top_p": 0.9, "logprob_mode": "raw"}, None, False),
        ({"min_tokens": 2}, None, None),
        ({"min_tokens": 2, "stop_token_ids": (5,)}, True, True),
        ({}, True, None),
    ],
)
def test_lockstep_servers_are_asked_and_vllm_has_no_field(
    options: dict[str, Any], support: bool | None, expected: bool | None
) -> None:
    request = GenerateRequest(prompt_ids=[1], sampling=Sampling(**options), support=support)
    body = json.loads(encode_lockstep(request))
    assert body.get("return_sampling_mask") is expected
    assert body.get("sampling_mask_format") == ("packed" if expected else None)
    if "logprob_mode" not in options:
        assert b"sampling_mask" not in encode_vllm(request, mode="processed")
