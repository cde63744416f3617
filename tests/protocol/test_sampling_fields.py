"""A sampling option is declared once, and no dialect drops one without a word."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest

from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.common.sampling_fields import BY_NAME, OPTIONS
from lockstep.protocol.dynamo import encode_chat as dynamo
from lockstep.protocol.openai.chat_decode import decode_chat
from lockstep.protocol.openai.completions import decode_completion
from lockstep.protocol.sglang import generate as sglang
from lockstep.protocol.vllm import encode_generate as vllm
from lockstep.protocol.vllm.generate_request import decode_request
from lockstep.tokens import Sampling
from lockstep.tokens.errors import UnsupportedField

ENCODERS = {
    "vllm": lambda request: vllm.encode_vllm(request, mode="raw"),
    "lockstep": vllm.encode_lockstep,
    "dynamo": lambda request: dynamo.encode_dynamo(request, mode="raw"),
    "dynamo-generate": lambda request: vllm.encode_dynamo_generate(request, mode="raw"),
    "sglang": lambda request: sglang.encode_sglang(
        request, mode="raw", max_new_tokens=request.sampling.max_tokens or 128, adapter=None
    ),
}
EXAMPLES: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "seed": 3, "max_tokens": 5,
    "min_tokens": 2, "stop": ("END",), "stop_token_ids": (9, 8), "ignore_eos": True, "n": 2,
    "allowed_token_ids": (1, 2), "logit_bias": {4: -1.5}, "logprobs": 3, "prompt_logprobs": 1,
    "logprob_mode": "processed", "presence_penalty": 0.5, "frequency_penalty": -0.5,
    "repetition_penalty": 1.25, "score_start": 1,
}  # fmt: skip
"""One value of each option that is not its default."""


def encode(dialect: str, **options: Any) -> Any:
    # Dynamo's generate route takes only requests that say how they end.
    ending = {"stop_token_ids": (9,)} if "ignore_eos" not in options else {}
    sampling = Sampling(**{**ending, **options})
    return json.loads(ENCODERS[dialect](GenerateRequest(prompt_ids=[5], sampling=sampling)))


def test_every_option_has_an_example_here() -> None:
    assert EXAMPLES.keys() == {field.name for field in fields(Sampling)}
    for field in fields(Sampling):
        assert EXAMPLES[field.name] != field.default


@pytest.mark.parametrize(
    "names", [vllm.NAMES, dynamo.NAMES, sglang.NAMES], ids=["vllm", "dynamo", "sglang"]
)
def test_each_dialect_has_decided_on_every_option(names: dict[str, str | None]) -> None:
    assert names.keys() == set(OPTIONS)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dialect", ENCODERS)
def test_an_option_is_sent_or_refused_by_name(dialect: str, option: str) -> None:
    try:
        body = encode(dialect, **{option: EXAMPLES[option]})
    except UnsupportedField as error:
        assert error.param == option
    else:
        assert body != encode(dialect), f"{option} makes no difference to the body"


@pytest.mark.parametrize("option", BY_NAME)
def test_every_request_body_reads_an_option_under_its_name(option: str) -> None:
    value = EXAMPLES[option]
    sent = {str(key): bias for key, bias in value.items()} if option == "logit_bias" else value
    bodies = (
        decode_request(json.dumps({"token_ids": [5], "sampling_params": {option: sent}}).encode()),
        decode_completion(json.dumps({"prompt": [5], option: sent}).encode()),
    )
    for body in bodies:
        assert getattr(body.sampling(), option) == value
    messages = [{"role": "user", "content": "hi"}]
    chat = decode_chat(json.dumps({"messages": messages, option: sent}).encode())
    assert getattr(chat.sampling(()), option) == value


def test_null_is_the_default() -> None:
    nulls = dict.fromkeys(BY_NAME)
    body = json.dumps({"token_ids": [5], "sampling_params": nulls}).encode()
    assert decode_request(body).sampling() == Sampling()
