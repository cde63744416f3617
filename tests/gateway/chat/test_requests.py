"""Chat requests: every known field has a meaning or a refusal, and no other is taken."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lockstep.protocol.openai.chat_decode import NEUTRAL, decode_chat
from lockstep.protocol.openai.chat_request import ChatRequest
from lockstep.tokens.errors import BadRequest, UnknownField, UnsupportedField

TOOL = {"type": "function", "function": {"name": "f"}}
MESSAGES = [{"role": "user", "content": "x"}]


def read(**body: Any) -> ChatRequest:
    return decode_chat(json.dumps({"messages": MESSAGES, **body}).encode())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"bogus": 1}, "bogus"),
        ({"nvext": {"bogus": 1}}, "nvext.bogus"),
        ({"nvext": {"agent_hints": {"bogus": 1}}}, "nvext.agent_hints.bogus"),
        ({"nvext": {"extra_fields": ["weight_version"]}}, "nvext.extra_fields"),
        ({"stream": True, "stream_options": {"bogus": 1}}, "stream_options.bogus"),
    ],
)
def test_unknown_fields_are_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(UnknownField) as caught:
        read(**body)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"echo": True}, "echo"),
        ({"nvext": {"max_thinking_tokens": 5}}, "nvext.max_thinking_tokens"),
        ({"nvext": {"greed_sampling": True}}, "nvext.greed_sampling"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}},
         "stream_options.continuous_usage_stats"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedField) as caught:
        read(**body)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 101}, "top_logprobs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": True},
         "continue_final_message"),
        ({"tools": [TOOL, {"type": "function"}]}, "tools[1].function"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "tool_calls": 5}]}, "messages[0].tool_calls"),
        ({"tokens": []}, "tokens"),
        ({"tokens": [1, -1]}, "tokens[1]"),
        ({"tokens": [1, "2"]}, "tokens[1]"),
        ({"tokens": [1], "nvext": {"token_data": [1]}}, "tokens"),
        ({"nvext": {"token_data": []}}, "nvext.token_data"),
        ({"request_id": "a\r\nx-evil: 1"}, "request_id"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"nvext": {"backend_instance_id": 1, "decode_worker_id": 2}},
         "nvext.backend_instance_id"),
        pytest.param({"cache_salt": "a", "nvext": {"cache_salt": "b"}}, "nvext.cache_salt",
                     marks=pytest.mark.failure_mode("F03")),
        pytest.param({"priority": 1, "nvext": {"agent_hints": {"priority": 1}}},
                     "nvext.agent_hints.priority", marks=pytest.mark.failure_mode("F04")),
    ],
)  # fmt: skip
def test_invalid_or_contradictory_fields_are_a_bad_request(
    body: dict[str, Any], param: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        read(**body)
    assert caught.value.param == param


def test_stock_clients_may_send_neutral_values() -> None:
    neutral = {field: values[0] for field, values in NEUTRAL.items() if values}
    chat = read(
        **neutral,
        stop=[],
        user="u",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        max_tokens=5,
        max_completion_tokens=5,
        parallel_tool_calls=False,
        top_logprobs=0,
        n=None,
        nvext={"agent_hints": {"osl": 3}, "annotations": []},
    )
    sampling = chat.sampling((7,))
    assert sampling.max_tokens == 5
    assert sampling.stop_token_ids == (7,)
    assert chat.choices == 1


@pytest.mark.parametrize("choice", [None, "auto", "none", {"name": TOOL["function"]["name"]}])
def test_functions_of_old_clients_are_tools(choice: Any) -> None:
    function = TOOL["function"]
    chat = read(
        functions=[function],
        function_call=choice,
        messages=[
            {"role": "user", "content": "1 + 1?"},
            {"role": "assistant", "content": None,
             "function_call": {"name": "calc", "arguments": "{}"}},
            {"role": "function", "name": "calc", "content": "2"},
        ],
    )  # fmt: skip
    assert chat.tools == [{"type": "function", "function": function}]
    expected = {"type": "function", "function": choice} if isinstance(choice, dict) else choice
    assert chat.tool_choice == expected
    assert chat.parallel_tool_calls is False
    _, called, result = chat.messages
    assert called["tool_calls"][0]["function"] == {"name": "calc", "arguments": "{}"}
    assert (result["role"], result["name"]) == ("tool", "calc")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"functions": [{"x": 1}]}, "functions[0]"),
        ({"functions": [TOOL["function"]], "tools": [TOOL]}, "functions"),
        ({"function_call": "auto", "tool_choice": "auto"}, "function_call"),
    ],
)
def test_functions_that_cannot_be_read_are_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read(**body)
    assert caught.value.param == param


def test_ignore_eos_leaves_only_the_caller_s_stop_ids() -> None:
    assert read(ignore_eos=True, stop_token_ids=[3]).sampling((7,)).stop_token_ids == (3,)
    assert read(stop_token_ids=[3]).sampling((7,)).stop_token_ids == (3, 7)


def test_logit_bias_keys_are_token_ids() -> None:
    assert read(logit_bias={"5": 1}).sampling(()).logit_bias == {5: 1.0}
    with pytest.raises(BadRequest, match="keys are token ids"):
        read(logit_bias={"x": 1}).sampling(())
