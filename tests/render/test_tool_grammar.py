"""The form of tool calls is found in what a template writes, whatever the family."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lockstep.render import Renderer
from lockstep.render.tool_grammar import TOOL, ToolFormat, tool_format, tool_grammar
from lockstep.tokens.errors import UnsupportedField
from lockstep.tokens.grammar import Grammar
from tests import tokenizers

HERMES = ('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n", "")


def loaded(name: str) -> Renderer:
    try:
        return Renderer.load(tokenizers.directory(name))
    except tokenizers.Unobtainable as error:
        pytest.skip(str(error))


def test_the_bundled_model_writes_calls_as_qwen_does() -> None:
    assert tool_format(Renderer.load("tiny")) == ToolFormat("", *HERMES)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3", ToolFormat("", *HERMES)),
        ("qwen2_5", ToolFormat("", *HERMES)),
        ("llama3_2", ToolFormat("", '{"name": "', '", "parameters": ', "}", None, "")),
        (
            "deepseek_v3",
            ToolFormat(
                "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
                "\n```json\n", "\n```<｜tool▁call▁end｜>", "\n", "<｜tool▁calls▁end｜>",
            ),
        ),
        ("mistral_nemo", None),
        ("gemma3", None),
    ],
)  # fmt: skip
def test_the_form_of_real_models_is_found(name: str, expected: ToolFormat | None) -> None:
    assert tool_format(loaded(name)) == expected


def test_a_format_without_a_grammar_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedField, match="chat template") as refused:
        tool_grammar(loaded("gemma3"), [TOOL], "required", parallel=True)
    assert refused.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("choice", "parallel", "kind"),
    [
        ("auto", True, None),
        (None, True, None),
        ("none", False, None),
        ("auto", False, "triggered_tags"),
        ("required", True, "tags_with_separator"),
        ({"type": "function", "function": {"name": "look_up"}}, True, "tags_with_separator"),
    ],
)
def test_only_what_is_demanded_is_held_to(choice: Any, parallel: bool, kind: str | None) -> None:
    grammar = tool_grammar(Renderer.load("tiny"), [TOOL], choice, parallel=parallel)
    form = None if grammar is None else json.loads(grammar.text)["format"]["type"]
    assert form == kind


def test_without_tools_the_content_s_own_grammar_stays() -> None:
    content = Grammar("regex", "a+")
    assert (
        tool_grammar(Renderer.load("tiny"), None, None, parallel=False, content=content) is content
    )
