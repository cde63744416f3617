"""A thought may come before what a grammar demands, wherever the prompt leaves room for one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lockstep.models import bundled
from lockstep.render import Renderer
from lockstep.render.thought import with_thought
from lockstep.render.tool_grammar import TOOL, tool_grammar
from lockstep.tokens.errors import BadRequest
from lockstep.tokens.grammar import Grammar
from tests import tokenizers

USER = [{"role": "user", "content": "Hi"}]
SCHEMA = Grammar("json", '{"type": "object"}')
FREE = '{"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<a>"]}}'
OWN = (
    '{"type": "structural_tag", "format": {"type": "tag", "begin": "<think>",'
    ' "content": {"type": "any_text"}, "end": "</think>"}}'
)


def tiny(**kwargs: Any) -> Renderer:
    return Renderer.load(bundled("tiny") or "tiny", template_kwargs=kwargs)


def loaded(name: str) -> Renderer:
    try:
        return Renderer.load(tokenizers.directory(name))
    except tokenizers.Unobtainable as error:
        pytest.skip(str(error))


def form_of(grammar: Grammar) -> Any:
    assert grammar.kind == "structural_tag"
    return json.loads(grammar.text)["format"]


def test_a_thought_that_the_prompt_did_not_open_may_come_or_not() -> None:
    renderer = tiny()
    form = form_of(with_thought(renderer, renderer.render(USER), SCHEMA))
    plain, behind = form["elements"]
    assert form["type"] == "or"
    assert plain == {"type": "json_schema", "json_schema": {"type": "object"}}
    thought, _, rest = behind["elements"]
    assert (thought["begin"], thought["end"], rest) == ("<think>", "</think>", plain)


@pytest.mark.parametrize("written", ["<think>\n", "<think>\nHm. I"])
def test_a_thought_that_the_prompt_opened_must_end_first(written: str) -> None:
    renderer = tiny()
    prompt = [*renderer.render(USER), *renderer.encode(written)]
    form = form_of(with_thought(renderer, prompt, SCHEMA))
    assert form["type"] == "sequence"
    assert (form["elements"][0]["begin"], form["elements"][0]["end"]) == ("", "</think>")


@pytest.mark.parametrize("kwargs", [{"enable_thinking": False}, {}])
def test_where_the_prompt_closes_the_thought_nothing_changes(kwargs: dict[str, bool]) -> None:
    renderer = tiny(**kwargs)
    ids = renderer.render(USER)
    prompt = ids if kwargs else [*ids, *renderer.encode("<think>\nHm.\n</think>\n\n")]
    assert with_thought(renderer, prompt, SCHEMA) is SCHEMA


def test_a_mark_in_what_a_user_writes_opens_and_closes_nothing() -> None:
    renderer = tiny()
    for text in ("what is <think>", "what is </think>"):
        prompt = renderer.render([{"role": "user", "content": text}])
        assert form_of(with_thought(renderer, prompt, SCHEMA))["type"] == "or"


def test_a_model_that_does_not_think_is_held_from_the_first_token() -> None:
    renderer = loaded("qwen2_5")
    assert with_thought(renderer, renderer.render(USER), SCHEMA) is SCHEMA


def test_qwen3_may_think_before_a_demanded_call() -> None:
    renderer = loaded("qwen3")
    calls = tool_grammar(renderer, [TOOL], "required", parallel=True)
    assert calls is not None
    held = with_thought(renderer, renderer.render(USER, [TOOL]), calls)
    assert form_of(held)["elements"][0] == form_of(calls)
    assert held.has_thought
    assert not calls.has_thought


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("grammar", 'start: "x"'),
        Grammar("structural_tag", FREE),
        Grammar("structural_tag", OWN),
        Grammar("structural_tag", "{}"),
    ],
)
def test_a_grammar_of_the_whole_turn_stays_as_it_is(grammar: Grammar) -> None:
    renderer = tiny()
    assert with_thought(renderer, renderer.render(USER), grammar) is grammar


def test_a_choice_is_one_of_its_strings() -> None:
    renderer = tiny()
    choice = Grammar("choice", '["yes", "no"]')
    form = form_of(with_thought(renderer, renderer.render(USER), choice))
    assert [each["value"] for each in form["elements"][0]["elements"]] == ["yes", "no"]


def test_a_schema_that_is_no_json_is_refused() -> None:
    renderer = tiny()
    with pytest.raises(BadRequest, match="no JSON"):
        with_thought(renderer, renderer.render(USER), Grammar("json", "{no"))
