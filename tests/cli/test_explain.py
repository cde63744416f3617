"""`lockstep explain` as a command, with the live server."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import lockstep
from lockstep.tokens import Sample
from tests.engine.rig import sample_of
from tests.processes import ServeProcess

SERVE = ("--sessions", "memory")
pytestmark = pytest.mark.close_arithmetic(
    "the reference of an explanation is close where this machine is; its band allows for that"
)


async def rollout(url: str, temperature: float) -> list[Sample]:
    async with lockstep.connect(url) as policy:
        prompts = [list(range(40 + at, 60 + at)) for at in range(4)]
        groups = await policy.map(
            prompts, temperature=temperature, max_tokens=16, seed=3, logprob_mode="processed"
        )
    return [sample_of(completion) for group in groups for completion in group]


def explain(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "explain", *arguments],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


async def test_the_command_names_the_cause_and_asks_the_server(
    served_gateway: ServeProcess, tmp_path: Path
) -> None:
    samples = [
        replace(sample, temperature=1.0) for sample in await rollout(served_gateway.url, 0.6)
    ]
    path = tmp_path / "samples.jsonl"
    path.write_bytes(b"\n".join(sample.to_json() for sample in samples) + b"\n")
    code, out = explain(
        str(path), "--checkpoint", "tiny", "--server", served_gateway.url, "--json",
        "--bundle", str(tmp_path / "out.zip"),
    )  # fmt: skip
    assert code == 1, out
    verdict = json.loads(out.splitlines()[-1])
    assert [cause["name"] for cause in verdict["causes"]] == ["temperature"]
    assert verdict["requests"] == 2 * len(samples)
    assert any("agree with the checkpoint" in note for note in verdict["notes"])
    assert (tmp_path / "out.zip").is_file()


def test_errors_name_the_option() -> None:
    code, out = explain("missing.jsonl", "--checkpoint", "tiny", "--engine-dtype", "float32")
    assert code == 2
    assert "missing.jsonl is neither a file of JSON lines nor a run directory" in out
