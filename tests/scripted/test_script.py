"""Selection of a script's rules, and errors for scripts that cannot be read."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from lockstep.scripted.distribution import HashedDistribution
from lockstep.scripted.script import PromptView, Script
from lockstep.tokens.errors import BadRequest

VIEW = PromptView("system text, then: open src/main.py", "open src/main.py", 2)


def script(tmp_path: Path, *lines: str) -> Script:
    path = tmp_path / "script.jsonl"
    path.write_text("\n".join(lines))
    return Script.read(path)


def test_the_first_rule_that_applies_is_used(tmp_path: Path) -> None:
    rules = script(
        tmp_path,
        '{"when": {"turn": 1}, "say": "another turn"}',
        '{"when": {"prompt": ["system", "absent"]}, "say": "another prompt"}',
        '{"when": {"without": "system"}, "say": "held"}',
        '{"when": {"last": "close"}, "say": "another message"}',
        '{"when": {"last": "open", "turn": 2, "prompt": "system"}, "say": "this"}',
        '{"say": "whatever else"}',
    )
    assert rules.find(VIEW)[1].say == "this"


def test_a_rule_is_used_at_most_the_given_number_of_times(tmp_path: Path) -> None:
    rules = script(tmp_path, '{"say": "once", "times": 1}', '{"say": "then"}')
    at, first = rules.find(VIEW)
    rules.take(at)
    assert (first.say, rules.find(VIEW)[1].say) == ("once", "then")


def test_groups_of_the_expression_are_filled_in_everywhere(tmp_path: Path) -> None:
    rule = script(
        tmp_path,
        '{"when": {"last": "open (?P<file>[^ ]+)/(\\\\S+)"}, "say": "{{file}} {{2}} {{none}}",'
        ' "calls": [{"name": "read", "arguments": {"paths": ["{{1}}/{{2}}"]}}]}',
    ).find(VIEW)[1]
    assert rule.say == "src main.py {{none}}"
    assert rule.calls[0].arguments == {"paths": ["src/main.py"]}


def test_a_prompt_without_a_rule_is_an_error_with_its_last_message(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"no rule.*open src/main\.py"):
        script(tmp_path, '{"when": {"turn": 9}}').find(VIEW)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"say": "ok"}\n{"said": "no"}', "line 2.*said"),
        ('[{"say": "ok"}, {"say": 1}]', "rule 1"),
        ('{"when": {"last": "("}}', "line 1.*unterminated"),
        ('{"error": {"status": 418}}', "line 1.*418"),
        ("", "no rule"),
        ("[{", "the file"),
    ],
)
def test_an_invalid_script_is_rejected_with_line_and_field(
    tmp_path: Path, text: str, why: str
) -> None:
    with pytest.raises(BadRequest, match=why):
        script(tmp_path, text)


def test_a_missing_script_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="absent"):
        Script.read(tmp_path / "absent")


def test_the_distribution_sums_to_one_and_depends_on_every_earlier_token() -> None:
    distribution = HashedDistribution(100)
    states = {distribution.after(distribution.start("weights"), ids) for ids in ([1, 2], [2, 1])}
    states.add(distribution.after(distribution.start("other"), [1, 2]))
    assert len(states) == 3
    for state in states:
        scores = [distribution.score_token(state, token, 0).logprob for token in range(100)]
        assert math.isclose(sum(map(math.exp, scores)), 1.0)
        top = distribution.likeliest(state, 3)
        assert [scores[one.token_id] for one in top] == sorted(scores)[::-1][:3]
        assert distribution.draw(state, 0.0) == top[0].token_id
        assert distribution.draw(state, 0.0, {top[0].token_id}) == top[1].token_id
