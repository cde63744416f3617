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
from lockstep.tokens.errors import BadRequest, UnsupportedField
from lockstep.tokens.grammar import Grammar

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
    "repetition_penalty": 1.25, "score_start": 1, "grammar": Grammar("regex", "[ab]+"),
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


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
JSON = Grammar("json", '{"type":"object","properties":{"a":{"type":"integer"}}}')


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"structured_outputs": {"json": SCHEMA}}, JSON),
        ({"structured_outputs": {"json": JSON.text}}, JSON),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_object")),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
        ({"structured_outputs": {"choice": ["x", "y"]}}, Grammar("choice", '["x","y"]')),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar("grammar", 'start: "a"')),
        ({"structured_outputs": {"structural_tag": "{}"}}, Grammar("structural_tag", "{}")),
        ({"guided_json": SCHEMA}, JSON),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ({"guided_choice": ["x"]}, Grammar("choice", '["x"]')),
        ({"guided_grammar": 'start: "a"'}, Grammar("grammar", 'start: "a"')),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, JSON),
    ],
)
def test_every_spelling_of_structured_output_is_one_grammar(
    fields: dict[str, Any], grammar: Grammar | None
) -> None:
    messages = [{"role": "user", "content": "hi"}]
    chat = decode_chat(json.dumps({"messages": messages, **fields}).encode())
    assert chat.sampling(()).grammar == grammar
    body = decode_completion(json.dumps({"prompt": [5], **fields}).encode())
    assert body.sampling().grammar == grammar
    if "response_format" not in fields:
        sent = json.dumps({"token_ids": [5], "sampling_params": fields}).encode()
        assert decode_request(sent).sampling().grammar == grammar
    if grammar is not None:
        # What is sent on is read as the same grammar again.
        request = GenerateRequest(prompt_ids=[5], sampling=Sampling(grammar=grammar))
        assert decode_request(vllm.encode_lockstep(request)).sampling().grammar == grammar


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json_object": True}},
         "structured_outputs.json_object"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
         "structured_outputs.regex"),
        ({"structured_outputs": {"json": True, "disable_any_whitespace": True}},
         "structured_outputs.json"),
        ({"structured_outputs": {"json_object": True, "disable_any_whitespace": True,
                                 "whitespace_pattern": " "}},
         "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex"),
        ({"guided_json": 5}, "guided_json"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ],
)  # fmt: skip
def test_structured_output_that_makes_no_sense_is_refused_by_name(
    fields: dict[str, Any], param: str
) -> None:
    body = decode_completion(json.dumps({"prompt": [5], **fields}).encode())
    with pytest.raises(BadRequest) as refused:
        body.sampling()
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("options", "compiled"),
    [({"whitespace_pattern": " "}, {"whitespace_flexible": True, "whitespace_pattern": " "}),
     ({"disable_any_whitespace": True}, {"whitespace_flexible": False})],
)  # fmt: skip
def test_whitespace_of_json_is_part_of_the_schema_and_rejected_where_it_would_be_ignored(
    options: dict[str, Any], compiled: dict[str, Any]
) -> None:
    fields = {"structured_outputs": {"json": SCHEMA, **options}}
    body = decode_completion(json.dumps({"prompt": [5], **fields}).encode())
    grammar = body.sampling().grammar
    assert grammar is not None
    assert json.loads(grammar.text) == {**SCHEMA, "x-guidance": compiled}
    request = GenerateRequest(prompt_ids=[5], sampling=Sampling(grammar=grammar))
    assert decode_request(vllm.encode_lockstep(request)).sampling().grammar == grammar
    for dialect in ("vllm", "sglang"):
        with pytest.raises(UnsupportedField, match="whitespace_pattern") as refused:
            encode(dialect, grammar=grammar)
        assert refused.value.param == "structured_outputs"


@pytest.mark.parametrize("stop", ["", ["END", ""]])
def test_an_empty_stop_string_is_refused_and_not_dropped(stop: Any) -> None:
    body = decode_completion(json.dumps({"prompt": [5], "stop": stop}).encode())
    with pytest.raises(BadRequest, match="none of them empty") as caught:
        body.sampling()
    assert caught.value.param == "stop"
