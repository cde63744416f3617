"""The harness environment on a real fleet: clean processes, budgets, rewards, exact samples."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep.client.policy import connect
from lockstep.fleet.remote import RemoteFleet
from lockstep.tokens import Sample, VersionSpan
from lockstep.tokens.errors import BadRequest, RolloutFailed
from lockstep.train.collect import collect
from lockstep.train.config import TrainConfig
from lockstep.train.envs import harness
from lockstep.train.envs.agent_session import agent_sessions
from lockstep.train.envs.environment import Reward, RolloutContext, load_environment
from lockstep.train.envs.judge import JudgedRun
from lockstep.train.learning.batch import Clock, Rollout, RolloutGroup, make_batch
from tests.processes import TOKEN
from tests.train.conftest import Stack, run_config

AGENT = str(Path(__file__).parent / "agent.py")
IN_PLACE = (
    "import os, json; a = open('answer.txt').read(); "
    "r = json.loads(os.environ['LOCKSTEP_TASK'])['task'].split()[1][::-1]; "
    "print(sum(x == y for x, y in zip(a, r)) / max(len(a), len(r)))"
)


def by_answer(run: JudgedRun) -> float:
    return float((run.work / "answer.txt").read_text().isdigit())


async def by_nothing(run: JudgedRun) -> Reward:
    return Reward(0.25, True, {"seen": run.failure})


def not_a_number(run: JudgedRun) -> float:
    return float("nan")


def options(directory: Path, *tasks: str, **more: Any) -> dict[str, Any]:
    lines = [json.dumps({"task": task, "id": f"t{at}"}) for at, task in enumerate(tasks)]
    (directory / "tasks.jsonl").write_text("\n".join(lines))
    return {
        "command": [sys.executable, AGENT, "{base_url}", "{task}"],
        "tasks": str(directory / "tasks.jsonl"),
        "reward": [sys.executable, "-c", IN_PLACE],
        "environment": {"AGENT_KEY": "{key}", "STRAYS": str(directory / "strays")},
        "seconds": 60,
        **more,
    }


async def play(stack: Stack, made: dict[str, Any]) -> tuple[Reward, list[Sample]]:
    """Run one rollout of the first task."""
    environment = load_environment("harness", made)
    url, admin = stack.process.url, stack.process.admin_url
    async with connect(url, "tiny") as policy, RemoteFleet(admin, token=TOKEN) as fleet:
        context = RolloutContext(policy, sessions=agent_sessions(url, policy, fleet))
        reward = await environment.rollout(next(environment.tasks("train", 0)), context)
        return reward, context.samples(train_aborted=False)


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


async def test_a_run_with_agents_trains_without_mismatch(stack: Stack, tmp_path: Path) -> None:
    made = options(tmp_path, *(f"plain {number}" for number in (4021, 317, 9946)))
    config = run_config(
        tmp_path / "run",
        env={"name": "harness", "options": made},
        rollout={"groups": 2, "group_size": 3, "concurrency": 2},
        loop={"steps": 2},
    )
    result = await stack.trainer(config).run()
    assert [step.skipped for step in result.steps] == [0, 0]
    for step in result.steps:
        assert step.more["mismatch_max"] == 0.0
        assert (step.dropped, step.breaks, step.off_policy_max) == (0, 0, 0)
    assert result.version.startswith("step-2")


async def test_the_agent_gets_a_clean_environment_and_its_own_home(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_TRAINER", "x")
    monkeypatch.setenv("HANDED_ON", "y")
    home = tmp_path / "template"
    (home / ".config").mkdir(parents=True)
    (home / ".config" / "agent.json").write_text('{"url": "{base_url}", "task": "{task}"}')
    check = (
        "import json, os, pathlib; e = json.load(open('environment.json')); "
        "c = json.loads(pathlib.Path(e['HOME'], '.config', 'agent.json').read_text()); "
        "assert c['url'].endswith('/v1') and c['task'] == 'plain 12', c; "
        "assert pathlib.Path('data.txt').read_text() == 'd'; "
        "assert sorted(e) == ['AGENT_KEY', 'HANDED_ON', 'HOME', 'LANG', 'LOCKSTEP_ROLLOUT', "
        "'PATH', 'STRAYS'], e"
    )
    files = tmp_path / "files"
    files.mkdir()
    (files / "data.txt").write_text("d")
    made = options(
        tmp_path, "plain 12", reward=[sys.executable, "-c", check], home=str(home),
        files=str(files), inherit=["HANDED_ON", "NOT_THERE"],
    )  # fmt: skip
    reward, (sample,) = await play(stack, made)
    assert (reward.value, reward.failure) == (1.0, None), reward.detail
    assert (sample.reward, sample.kind) == (1.0, "main")
    assert "the model said" in reward.detail["agent_output"]


@pytest.mark.parametrize(
    ("task", "more", "failure"),
    [
        ("fail 12", {}, "exit 3"),
        ("hang 12", {"seconds": 2}, "timeout"),
        ("loop 12", {"max_calls": 3}, "budget: calls"),
        ("loop 12", {"max_tokens": 1}, "budget: tokens"),
    ],
    ids=["exit", "timeout", "calls", "tokens"],
)
async def test_a_failed_agent_has_a_cause_and_samples(
    stack: Stack,
    tmp_path: Path,
    task: str,
    more: dict[str, Any],
    failure: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(harness, "END_SECONDS", 0.2)
    started = time.monotonic()
    reward, samples = await play(stack, options(tmp_path, task, **more))
    assert time.monotonic() - started < 30
    assert (reward.failure, reward.detail["failure"]) == (failure, failure)
    assert samples
    kept, _ = await play(stack, options(tmp_path, task, **more, train_failed=True))
    assert (kept.failure, kept.detail["failure"]) == (None, failure)


@pytest.mark.parametrize("task", ["hang 12", "stray 12"])
async def test_no_process_of_an_agent_is_left_running(
    stack: Stack, tmp_path: Path, task: str
) -> None:
    reward, _ = await play(stack, options(tmp_path, task, seconds=2))
    assert reward.failure == ("timeout" if task.startswith("hang") else None)
    (stray,) = (tmp_path / "strays").read_text().split()
    deadline = time.monotonic() + 5
    while is_alive(int(stray)) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert not is_alive(int(stray))


def test_a_failed_rollout_is_left_out_of_its_group() -> None:
    sample = Sample(
        token_ids=[1, 2], sampled_mask=[False, True], logprobs=[0.0, -1.0],
        versions=(VersionSpan("a", 1, 2),), logprob_mode="processed",
    )  # fmt: skip
    rewards = (Reward(1.0, True), Reward(0.0, False), Reward(9.0, True, failure="timeout"))
    group = RolloutGroup(tuple(Rollout(reward, (sample,)) for reward in rewards))
    batch = make_batch([group], Clock({"a": 0}), 0, TrainConfig(), 0)
    assert [item.advantage for item in batch.items] == [0.5, -0.5]
    assert batch.dropped == 1


async def test_collect_writes_samples_to_a_file(stack: Stack, tmp_path: Path) -> None:
    made = options(tmp_path, "plain 4021", "fail 12", reward=f"{__name__}:by_answer")
    config = run_config(
        tmp_path / "run",
        env={"name": "harness", "options": made},
        serve={
            "url": stack.process.url, "admin_url": stack.process.admin_url, "admin_token": TOKEN,
        },
        rollout={"groups": 2, "group_size": 2, "concurrency": 2},
        loop={"steps": 1},
    )  # fmt: skip
    out = tmp_path / "samples.jsonl"
    total = await collect(config, out)
    assert (total.rollouts, total.samples, dict(total.failed)) == (4, 2, {"exit 3": 2})
    samples = [Sample.from_json(line) for line in out.read_bytes().splitlines()]
    assert [sample.notes[-1]["rollout"] for sample in samples] == [0, 1]
    assert all(sample.reward is not None for sample in samples)
    with pytest.raises(BadRequest, match="choose another file"):
        await collect(config, out)


async def test_a_function_computes_the_reward(stack: Stack, tmp_path: Path) -> None:
    made = options(tmp_path, "fail 12", reward=f"{__name__}:by_nothing")
    reward, (sample,) = await play(stack, made)
    assert (reward.value, reward.solved, reward.detail["seen"]) == (0.25, True, "exit 3")
    assert sample.reward == 0.25
    with pytest.raises(RolloutFailed, match="expected a finite number"):
        await play(stack, options(tmp_path, "plain 1", reward=f"{__name__}:not_a_number"))
    with pytest.raises(RolloutFailed, match="reward command could not run"):
        await play(stack, options(tmp_path, "plain 1", reward=["sh", "-c", "exit 127"]))
    with pytest.raises(BadRequest, match="cannot be started"):
        await play(stack, options(tmp_path, "plain 1", command=["no-such-agent"]))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"comand": ["x"]}, "env.options.comand is not a known field"),
        ({"command": "mini"}, "Expected `array`"),
        ({"command": []}, "env.options.command is empty"),
        ({"seconds": 0}, "env.options.seconds is 0"),
        ({"files": "no-such-directory"}, "expected a directory"),
        ({"tasks": "no-such-file"}, "cannot be read"),
        ({"reward": "check"}, "module:name"),
        ({"reward": "no_such_module:name"}, "no_such_module"),
        ({"kinds": ["mains"]}, "kinds has 'mains'"),
        ({"weights": "tokens"}, "weights is 'tokens'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_wrong_option_is_an_error_that_names_it(
    tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadRequest, match=message):
        load_environment("harness", {**options(tmp_path, "plain 1"), **more})


def test_tasks_repeat_in_an_order_of_the_seed_without_held_out_ones(tmp_path: Path) -> None:
    made = options(tmp_path, *(f"plain {number}" for number in range(4)))
    with open(tmp_path / "tasks.jsonl", "a") as file:
        file.write("\n" + json.dumps({"task": "held out", "split": "eval"}))
    environment = load_environment("harness", made)
    first, again = environment.tasks("train", 3), environment.tasks("train", 3)
    names = [next(first).facts["id"] for _ in range(8)]
    assert names == [next(again).facts["id"] for _ in range(8)]
    assert {*names[:4]} == {*names[4:]} == {"t0", "t1", "t2", "t3"}
    assert next(environment.tasks("eval", 3)).facts["task"] == "held out"
