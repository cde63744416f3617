"""Structured output: only tokens that fit are sampled, and their logprobs can be recomputed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.engine.exact import sample_logprobs
from lockstep.engine.text.grammars import Grammars
from lockstep.render import Renderer
from lockstep.render.thought import with_thought
from lockstep.render.tool_grammar import tool_grammar
from lockstep.tokens import Completion
from lockstep.tokens.errors import BadRequest, UnsupportedField
from lockstep.tokens.grammar import Grammar
from tests.engine import checkpoints
from tests.engine.rig import Rig, ids, sample_of

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CALL = {
    "type": "tag",
    "begin": '<tool_call>\n{"name": "look", "arguments": ',
    "content": {"type": "json_schema", "json_schema": {"type": "object", "properties": {},
                                                       "additionalProperties": False}},
    "end": "}\n</tool_call>",
}  # fmt: skip
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"deep": {"type": "boolean"}},
                       "required": ["deep"], "additionalProperties": False},
    },
}  # fmt: skip
JSON = Grammar("json", json.dumps(SCHEMA))
GRAMMARS = [
    JSON,
    Grammar("regex", "[a-f]{3}-[0-9]{2}"),
    Grammar("choice", '["yes", "no", "perhaps"]'),
    Grammar("grammar", 'start: "x" /[0-9]/ "y"'),
]


@pytest.fixture(scope="module")
def rig(tiny: Path) -> Rig:
    return Rig(tiny, logprob_mode="processed")


def text_of(rig: Rig, completion: Completion) -> str:
    return b"".join(rig.core.vocabulary.text(token) for token in completion.token_ids).decode()


def held(rig: Rig, grammar: Grammar, **options: Any) -> Completion:
    settings = {"ignore_eos": False, "max_tokens": 400, "seed": 3, "temperature": 1.5} | options
    return rig.generate(ids(51, 25), grammar=grammar, **settings)


@pytest.mark.failure_mode("F67")
@pytest.mark.parametrize("seed", range(6))
def test_json_fits_its_schema_whatever_is_drawn(rig: Rig, seed: int) -> None:
    completion = held(rig, JSON, seed=seed)
    assert completion.finish == "stop"
    value = json.loads(text_of(rig, completion))
    assert {"name", "age"} <= value.keys() <= {"name", "age", "tags"}
    assert 0 <= value["age"] <= 99
    assert len(value["name"]) <= 6


@pytest.mark.failure_mode("F67")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["json", "structural_tag"])
@pytest.mark.parametrize("form", [True, {"type": "array", "items": {"enum": [1, 2]}}])
def test_whitespace_in_json_is_a_space_or_a_line_break_with_indentation(
    rig: Rig, form: Any, kind: str, seed: int
) -> None:
    schema = {"type": "object", "properties": {"a": form}, "required": ["a"]}
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    grammar = Grammar("json", json.dumps(schema))
    if kind == "structural_tag":
        grammar = Grammar("structural_tag", json.dumps(tag))
    # The model is pushed to write whitespace wherever it may.
    spaces = {t: 60.0 for t in range(rig.core.config.vocab_size)
              if (text := rig.core.vocabulary.text(t)) and not text.strip(b" \n\t")}  # fmt: skip
    text = text_of(rig, held(rig, grammar, seed=seed, logit_bias=spaces, max_tokens=60))
    outside = re.sub(r'"([^"\\]|\\.)*("|$)', "", text)
    runs = re.findall(r"\s+", outside)
    assert runs
    assert all(re.fullmatch(r" |\n[ \t]{0,20}", run) for run in runs), runs


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"whitespace_flexible": False}, r"\[[12,]+\]?"),
     ({"whitespace_pattern": r"[ \n\t]{0,90}"}, r"\[ {60,}.*")],
)  # fmt: skip
def test_a_schema_may_set_its_own_whitespace(
    rig: Rig, options: dict[str, Any], expected: str
) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "x-guidance": options}
    spaces = {t: 90.0 for t in range(rig.core.config.vocab_size)
              if rig.core.vocabulary.text(t) == b" "}  # fmt: skip
    grammar = Grammar("json", json.dumps(schema))
    text = text_of(rig, held(rig, grammar, logit_bias=spaces, max_tokens=80))
    assert re.fullmatch(expected, text, re.DOTALL), text


def test_other_kinds_of_grammars_are_followed(rig: Rig) -> None:
    assert re.fullmatch("[a-f]{3}-[0-9]{2}", text_of(rig, held(rig, GRAMMARS[1])))
    assert text_of(rig, held(rig, GRAMMARS[2])) in ("yes", "no", "perhaps")
    assert re.fullmatch("x[0-9]y", text_of(rig, held(rig, GRAMMARS[3])))
    anything = held(rig, Grammar("json_object"), max_tokens=300)
    if anything.finish == "stop":
        assert isinstance(json.loads(text_of(rig, anything)), dict)


@pytest.mark.exact_arithmetic
@pytest.mark.failure_mode("F67")
@pytest.mark.failure_mode("F100")
@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
def test_processed_logprobs_are_after_the_mask_and_score_again_bit_for_bit(
    rig: Rig, grammar: Grammar
) -> None:
    completion = held(rig, grammar, top_p=0.95, repetition_penalty=1.1)
    assert completion.shaping is not None
    assert completion.shaping.grammar == grammar
    grammars = Grammars.of(rig.directory, rig.core.config.vocab_size)
    sample = sample_of(completion)
    with torch.no_grad():
        (again,) = sample_logprobs(checkpoints.trainer(rig.directory), [sample], grammars)
    assert again[-len(completion.token_ids) :].tolist() == completion.logprobs
    with pytest.raises(BadRequest, match=grammar.digest):
        sample_logprobs(checkpoints.trainer(rig.directory), [sample])
    # The recorded sets contain the masks: no grammar has to be followed again.
    recorded = sample_of(held(rig, grammar, top_p=0.95, repetition_penalty=1.1, support=True))
    with torch.no_grad():
        (replayed,) = sample_logprobs(checkpoints.trainer(rig.directory), [recorded])
    assert torch.equal(replayed, again)


@pytest.mark.exact_arithmetic
def test_the_engine_recomputes_processed_logprobs(rig: Rig) -> None:
    completion = held(rig, JSON)
    prompt = list(completion.prompt_ids)
    scored = held_score(rig, prompt + completion.token_ids, len(prompt))
    assert scored == completion.logprobs


def held_score(rig: Rig, token_ids: list[int], start: int, grammar: Grammar = JSON) -> list[float]:
    completion = rig.generate(
        token_ids, grammar=grammar, ignore_eos=False, temperature=1.5, max_tokens=1, seed=3,
        prompt_logprobs=0, score_start=start,
    )  # fmt: skip
    assert completion.prompt_logprobs is not None
    return [one.logprob for one in completion.prompt_logprobs[start:] if one is not None]


@pytest.mark.exact_arithmetic
@pytest.mark.failure_mode("F67")
def test_raw_logprobs_stay_those_of_the_free_model(rig: Rig) -> None:
    completion = held(rig, JSON, logprob_mode="raw")
    whole = [*completion.prompt_ids, *completion.token_ids]
    count = len(completion.token_ids)
    assert completion.logprobs == checkpoints.reference(rig.directory, whole)[-count:]
    assert completion.shaping is not None


def test_choices_and_neighbours_do_not_disturb_each_other(rig: Rig) -> None:
    alone = held(rig, JSON, seed=5)
    free = rig.submit(ids(60, 30), max_tokens=30)
    both = rig.submit(ids(51, 25), grammar=JSON, n=2, seed=4, ignore_eos=False, max_tokens=400,
                      temperature=1.5)  # fmt: skip
    rig.run()
    assert both.completions[1].token_ids == alone.token_ids
    assert free.one.shaping is None


def test_without_end_tokens_a_complete_grammar_ends_the_choice(rig: Rig) -> None:
    completion = held(rig, GRAMMARS[1], ignore_eos=True)
    assert completion.finish == "stop"
    assert re.fullmatch("[a-f]{3}-[0-9]{2}", text_of(rig, completion))


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (Grammar("regex", "(unclosed"), "regex"),
        (Grammar("json", "{not json"), "JSON"),
        (Grammar("json", '{"type": "strin"}'), "json"),
        (Grammar("grammar", "start: missing"), "missing"),
        (Grammar("structural_tag", "{}"), "structural_tag"),
        (Grammar("structural_tag", '{"format": {"type": "novel"}}'), "novel"),
        (Grammar("json", " " * ((1 << 20) + 1)), "characters"),
    ],
)
def test_an_invalid_grammar_is_rejected_before_anything_runs(
    rig: Rig, grammar: Grammar, says: str
) -> None:
    with pytest.raises(BadRequest, match=says) as refused:
        held(rig, grammar)
    assert (refused.value.param or "").startswith("structured_outputs")
    assert rig.idle


def test_a_grammar_is_compiled_once(rig: Rig) -> None:
    grammars = Grammars.of(rig.directory, rig.core.config.vocab_size)
    grammars.compile(JSON)
    first = grammars._compiled[JSON]
    grammars.compile(Grammar("json", json.dumps(SCHEMA)))
    assert grammars._compiled[JSON] is first
    assert len(grammars._compiled) == 1


def test_min_tokens_with_a_grammar_is_rejected(rig: Rig) -> None:
    with pytest.raises(BadRequest, match="min_tokens"):
        held(rig, JSON, min_tokens=3)


def test_a_grammar_without_a_tokenizer_is_rejected(rig: Rig, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedField, match="tokenizer"):
        Grammars.of(tmp_path, 512).compile(JSON)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"type": "tags_with_separator", "tags": [CALL], "separator": "\n", "at_least_one": True,
          "stop_after_first": True}, r"<tool_call>.*</tool_call>"),
        ({"type": "tags_with_separator", "tags": [CALL], "separator": "\n", "at_least_one": True},
         r"<tool_call>.*</tool_call>(\n<tool_call>.*</tool_call>)*"),
        ({"type": "sequence", "elements": [{"type": "const_string", "value": "So: "}, CALL]},
         r"So: <tool_call>.*</tool_call>"),
        ({"type": "or", "elements": [{"type": "const_string", "value": "none"}, CALL]},
         r"none|<tool_call>.*</tool_call>"),
    ],
)  # fmt: skip
def test_a_structural_tag_constrains_tool_calls(
    rig: Rig, form: dict[str, Any], pattern: str
) -> None:
    grammar = Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": form}))
    completion = held(rig, grammar, max_tokens=200, temperature=0.7)
    text = text_of(rig, completion)
    assert re.fullmatch(pattern if completion.finish == "stop" else ".*", text, re.DOTALL), text


def test_after_one_call_no_second_one_can_begin(rig: Rig) -> None:
    form = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [CALL],
            "stop_after_first": True}  # fmt: skip
    grammar = Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": form}))
    matcher = rig.core.grammars.matcher(grammar)
    encode = rig.core.vocabulary.tokenizer.encode
    call = 'Well. <tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    ends = (505,)
    for token in encode("Well. ", add_special_tokens=False).ids:
        assert matcher.mask(ends)[token]
        matcher.consume(token)
    assert matcher.mask(ends)[505], "free text may end"
    for token in encode(call[6:], add_special_tokens=False).ids:
        assert matcher.mask(ends)[token], rig.core.vocabulary.text(token)
        matcher.consume(token)
    assert not matcher.error
    assert matcher.mask(ends).nonzero().flatten().tolist() == [505]


def test_text_in_a_tag_ends_at_the_first_end_of_the_tag(rig: Rig) -> None:
    note = {"type": "tag", "begin": "(", "content": {"type": "any_text"}, "end": "!)"}
    form = {"type": "sequence", "elements": [note, {"type": "const_string", "value": "x"}]}
    grammar = Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": form}))
    matcher = rig.core.grammars.matcher(grammar)
    for token in rig.core.vocabulary.tokenizer.encode("(a) b!)").ids:
        assert matcher.mask(())[token]
        matcher.consume(token)
    left = matcher.mask(()).nonzero().flatten().tolist()
    assert [rig.core.vocabulary.text(token) for token in left] == [b"x"]


@pytest.mark.parametrize(
    ("pattern", "text"), [(r"a/b\/[/]", "a/b//"), ("a\nb", "a\nb"), ("(a|b/){0}", ""), ("", "")]
)
def test_a_regular_expression_in_a_tag_may_contain_slashes_and_lines(
    rig: Rig, pattern: str, text: str
) -> None:
    form = {"type": "regex", "pattern": pattern}
    grammar = Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": form}))
    assert text_of(rig, held(rig, grammar)) == text


def thinking(rig: Rig, opened: str = "") -> tuple[list[int], Grammar]:
    """Return a prompt, and the grammar of a tool call required after it."""
    renderer = Renderer.load(rig.directory)
    prompt = renderer.render([{"role": "user", "content": "Hi"}], [TOOL])
    prompt += renderer.encode(opened)
    calls = tool_grammar(renderer, [TOOL], "required", parallel=False)
    assert calls is not None
    return prompt, with_thought(renderer, prompt, calls)


@pytest.mark.exact_arithmetic
@pytest.mark.failure_mode("F67")
def test_a_required_call_after_a_thought_is_rescored_bit_for_bit(rig: Rig) -> None:
    prompt, grammar = thinking(rig, "<think>\n")
    close = rig.core.vocabulary.added["</think>"]
    completion = rig.generate(
        prompt, grammar=grammar, ignore_eos=False, max_tokens=600, seed=3, temperature=0.8,
        logit_bias={close: 8.0},
    )  # fmt: skip
    assert completion.token_ids.count(close) == 1
    assert completion.finish == "stop"
    assert "look_up" in text_of(rig, completion)
    again = scored_again(rig, completion)
    assert again == completion.logprobs


@pytest.mark.exact_arithmetic
@pytest.mark.failure_mode("F67")
@pytest.mark.parametrize(
    "thought", [None, "", "\n\n", "\nHm, a <tool_call>?\n", "\n" + "so, " * 90]
)
def test_engine_and_trainer_score_a_call_equally_after_any_thought(
    rig: Rig, thought: str | None
) -> None:
    prompt, grammar = thinking(rig)
    call = '<tool_call>\n{"name": "look_up", "arguments": {"deep": true}}\n</tool_call>'
    text = call if thought is None else f"<think>{thought}</think>\n\n{call}"
    tokens = [*rig.core.vocabulary.tokenizer.encode(text).ids, 505]
    scored = held_score(rig, prompt + tokens, len(prompt), grammar)
    drawn = rig.generate(prompt, grammar=grammar, ignore_eos=False, temperature=1.5, max_tokens=1)
    assert drawn.shaping is not None
    versions = (replace(drawn.versions[0], end=len(tokens)),)
    written = replace(drawn, token_ids=tokens, logprobs=scored, versions=versions, ranks=None)
    assert scored_again(rig, written) == scored


def scored_again(rig: Rig, completion: Completion) -> list[float]:
    grammars = Grammars.of(rig.directory, rig.core.config.vocab_size)
    with torch.no_grad():
        (again,) = sample_logprobs(
            checkpoints.trainer(rig.directory), [sample_of(completion)], grammars
        )
    scores: list[float] = again[-len(completion.token_ids) :].tolist()
    return scores


def test_a_special_token_that_is_no_end_token_is_never_allowed(rig: Rig) -> None:
    matcher = rig.core.grammars.matcher(Grammar("regex", "[a-z]*"))
    specials = sorted(rig.core.vocabulary.specials)
    assert not matcher.mask(())[specials].any()
    assert matcher.mask((specials[1],))[specials].tolist() == [False, True, False]


def test_a_grammar_that_fails_during_generation_ends_only_its_request(rig: Rig) -> None:
    held_one = rig.submit(ids(51, 25), grammar=JSON, ignore_eos=False, max_tokens=100)
    free = rig.submit(ids(61, 25), max_tokens=12)
    rig.run(3)
    (sequence,) = held_one.handle.sequences
    assert sequence.matcher is not None
    sequence.matcher.consume(next(iter(rig.core.vocabulary.specials)))
    rig.run()
    assert isinstance(held_one.error, BadRequest)
    assert held_one.error.param == "structured_outputs"
    assert len(free.one.token_ids) == 12
