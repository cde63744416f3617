"""The bundled environments: tasks and rewards; loading environments by name."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.render.authors import authors
from lockstep.tokens.errors import BadRequest, RolloutFailed
from lockstep.train.envs.bundled import BUNDLED, run_calc
from lockstep.train.envs.environment import (
    Environment,
    Reward,
    RolloutContext,
    Split,
    Task,
    check_reward,
    load_environment,
)


@dataclass
class Scripted:
    """A conversation with scripted replies."""

    replies: list[Any]
    heard: list[Any] = field(default_factory=list)
    messages: list[Any] = field(default_factory=list)

    async def send(self, message: Any) -> Any:
        self.heard.append(message)
        self.messages += message if isinstance(message, list) else [message]
        reply = self.replies.pop(0)
        text, calls = (reply, ()) if isinstance(reply, str) else ("", (reply,))
        self.messages.append({"role": "assistant", "content": text})
        return SimpleNamespace(text=text, tool_calls=calls, finish="stop")

    send_tool_results = send


class ScriptedContext:
    def __init__(self, *replies: Any) -> None:
        self.one = Scripted(list(replies))

    def chat(self, task: Task | None = None, **_: Any) -> Scripted:
        return self.one


def first(env: Environment, split: Split = "train") -> Task:
    return next(iter(env.tasks(split, 1)))


async def play(env: Environment, task: Task, *replies: Any) -> Reward:
    return await env.rollout(task, ScriptedContext(*replies))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(BUNDLED))
def test_tasks_are_the_same_for_a_seed_and_none_is_in_both_splits(name: str) -> None:
    env = load_environment(name)

    def some(split: Split, seed: int) -> list[str]:
        tasks = itertools.islice(env.tasks(split, seed), 200)
        return [repr((task.messages, sorted(task.facts.items()))) for task in tasks]

    assert some("train", 1) == some("train", 1)
    assert some("train", 1) != some("train", 2)
    assert not set(some("train", 1)) & set(some("eval", 1))


async def test_reverse_rewards_digits_in_place() -> None:
    env = load_environment("reverse")
    task = Task(({"role": "user", "content": "Reverse: 1234"},), facts={"answer": "4321"})
    assert await play(env, task, "4321") == Reward(1.0, True, {"response": "4321"})
    assert (await play(env, task, "4300")).value == 0.25
    assert (await play(env, task, "43210000")).value == 0.25
    assert (await play(env, task, "")).value == 0.0


async def test_calc_is_solved_only_through_the_tool() -> None:
    env = load_environment("calc")
    task = first(env)
    right, answer = task.facts["expression"], task.facts["answer"]

    def call(expression: str) -> Any:
        return SimpleNamespace(name="calc", arguments=f'{{"expression": "{expression}"}}')

    assert await play(env, task, call(right), answer) == Reward(
        1.0, True, {"called": True, "right_call": True, "response": answer}
    )
    assert (await play(env, task, answer)).value == 0.0
    assert (await play(env, task, call(right), "7")).value == pytest.approx(0.4)
    assert (await play(env, task, call("1 + 1"), "2")).value == pytest.approx(0.2)
    assert run_calc("{") == run_calc('{"expression": "1 / 0"}') == ("error", None)


async def test_guess_rewards_using_the_hints() -> None:
    env = load_environment("guess")
    task = Task(({"role": "user", "content": "Guess"},), facts={"secret": 60})
    reward = await play(env, task, "50", "75", "60")
    assert (reward.value, reward.solved) == (1.0, True)
    heeded = await play(env, task, "50", "75", "62", "56", "59", "61", "5")
    ignored = await play(env, task, "50", "1", "2", "3", "4", "5", "6")
    assert 0.5 > heeded.value > ignored.value > 0
    assert (await play(env, task, "what")).value == 0.0


class Mine:
    def __init__(self, count: int = 1) -> None:
        self.count = count

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        yield Task(())

    async def rollout(self, task: Task, context: RolloutContext) -> Reward:
        return Reward(0.0, False)


def test_an_environment_is_found_by_import_path() -> None:
    made = load_environment("tests.train.envs.test_bundled:Mine", {"count": 3})
    assert isinstance(made, Mine)
    assert made.count == 3


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "chess",
            {},
            "expected one of calc, guess, reverse, harness, verifiers:NAME, or an import path",
        ),
        ("absent.module:Name", {}, "No module named 'absent'"),
        ("tests.train.envs.test_bundled:Absent", {}, "has no 'Absent'"),
        (
            "tests.train.envs.test_bundled:Scripted",
            {"replies": []},
            "without the methods tasks",
        ),
        ("reverse", {"digits": 3}, "does not accept the options {'digits': 3}"),
        ("verifiers:none", {}, "needs the verifiers package"),
    ],
)
def test_an_environment_that_cannot_be_loaded_is_an_error_with_the_cause(
    name: str, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(BadRequest, match=message):
        load_environment(name, options)


class Broken:
    def __init__(self) -> None:
        raise KeyError("no such dataset")


def test_an_error_on_import_or_in_the_constructor_is_one_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RolloutFailed, match=r"KeyError: 'no such dataset' .*in its constructor"):
        load_environment("tests.train.envs.test_bundled:Broken")
    (tmp_path / "half_written_task.py").write_text("def tasks(:\n")
    (tmp_path / "slipped_task.py").write_text("import os\nos.nothing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RolloutFailed, match=r"SyntaxError: .*half_written_task.py, line 1"):
        load_environment("half_written_task:Mine")
    with pytest.raises(RolloutFailed, match=r"has no attribute 'nothing' .*on import"):
        load_environment("slipped_task:Mine")


@pytest.mark.parametrize("reward", [1.0, None, True, Reward(float("nan"), False)])
def test_an_invalid_reward_is_an_error(reward: object) -> None:
    with pytest.raises(RolloutFailed, match=r"rollout returned .*: expected"):
        check_reward(reward)


def test_every_token_has_an_author() -> None:
    text = ["<|im_start|>", "us", "er", "\n", "Hi", "<|im_end|>", "\n", "<|im_start|>", "assistant",
            "\n", "Yo", "<|im_end|>", "\n", "<|im_start|>", "user", "\n", "<tool_response>", "\n",
            "7", "</tool_response>", "<|im_end|>"]  # fmt: skip
    sampled = [token in ("Yo",) or at == 11 for at, token in enumerate(text)]
    written = authors(text, sampled)
    pairs = {token: role for token, role in zip(text, written, strict=True) if token.isalnum()}
    assert pairs == {"us": "template", "er": "template", "Hi": "user", "assistant": "template",
                     "Yo": "assistant", "user": "template", "7": "tool"}  # fmt: skip
    assert written[11] == "assistant"
