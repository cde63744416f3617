"""The examples with real agents, as a user runs them: rollouts by a command, and a training run."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lockstep.render import Renderer
from lockstep.tokens import Sample
from tests.agents.programs import PATH
from tests.processes import TOKEN, ServeProcess

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]


@contextmanager
def served(*arguments: str) -> Iterator[ServeProcess]:
    process = ServeProcess("--sessions", "memory", *arguments)
    try:
        yield process
    finally:
        process.stop()


async def lockstep(
    process: ServeProcess, command: str, config: str, directory: Path, *more: str
) -> list[Any]:
    """Runs a command with a config that knows the gateway; what it printed, line by line."""
    path = directory / "run.toml"
    text = config.replace("http://127.0.0.1:8000", process.url)
    text = text.replace("http://127.0.0.1:8001", process.admin_url)
    path.write_text(re.sub("(?m)^run_dir = .*", f'run_dir = "{directory}/run"', text))
    running = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "lockstep", command, str(path), "--json", *more),
        cwd=ROOT,
        env={**os.environ, "PATH": PATH, "LOCKSTEP_ADMIN_TOKEN": TOKEN},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await running.communicate()
    assert running.returncode == 0, errors.decode()
    return [json.loads(line) for line in output.splitlines()]


@pytest.mark.parametrize(
    ("example", "harness"), [("mini_swe_agent", "OpenAI/Python"), ("codex", "codex")]
)
async def test_an_example_gives_the_samples_of_every_rollout(
    tmp_path: Path, example: str, harness: str
) -> None:
    directory = ROOT / "examples" / example
    out = tmp_path / "samples.jsonl"
    with served("--worker-args", f"--script {directory / 'script.jsonl'}") as process:
        config = (directory / "run.toml").read_text()
        config = config.replace("group_size = 4", "group_size = 2")
        *_, result = await lockstep(process, "rollout", config, tmp_path, "--out", str(out))
    assert (result["rollouts"], result["samples"], result["failed"]) == (4, 4, {})
    assert result["solved"] == 2
    samples = [Sample.from_json(line) for line in out.read_bytes().splitlines()]
    assert sorted(sample.reward or 0.0 for sample in samples) == [0.1, 0.1, 1.0, 1.0]
    renderer = Renderer.load("tiny")
    for sample in samples:
        assert (sample.kind, sample.breaks, sample.harness) == ("main", (), harness)
        words = renderer.decode(
            [
                token
                for token, sampled in zip(sample.token_ids, sample.sampled_mask, strict=True)
                if sampled
            ]
        )
        # Three turns in one line of tokens, and the fix that was judged among them.
        assert words.count("<|im_end|>") == 3
        assert "cat calc.py" in words
        assert ("Perhaps" in words) == (sample.reward == 0.1)


async def test_a_model_is_trained_on_a_real_agent_without_any_mismatch(tmp_path: Path) -> None:
    """The bundled model cannot write commands, so every run ends by its budget; what it sampled in
    them is learnt from all the same, which is what an exact record is for."""
    config = (ROOT / "examples" / "mini_swe_agent" / "run.toml").read_text()
    for old, new in (
        ('"-c", "mini.yaml",', '"-c", "mini.yaml", "-c", "model.model_kwargs.max_tokens=40",'),
        ("max_calls = 30", "max_calls = 2\ntrain_failed = true"),
        ('["python3", "{cwd}/examples/toy/reward.py"]', '["sh", "-c", "wc -c < $HOME/*.json"]'),
        ("group_size = 4", "group_size = 2"),
    ):
        assert old in config
        config = config.replace(old, new)
    with served() as process:
        *steps, result = await lockstep(process, "train", config, tmp_path)
    assert [step["skipped"] for step in steps] == [0, 0]
    assert result["mismatch_max"] == 0.0
    assert result["version"].startswith("step-2")
    for step in steps:
        # A program draws without a seed, and the model may end a turn with its first token.
        assert step["tokens"] >= 1
        assert (step["dropped"], step["off_policy_max"]) == (0, 0)
