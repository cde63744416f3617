"""Exported traces as verifiers and OpenEnv themselves read them, token for token."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.clients.conftest import PYTHON
from tests.export.samples import two_turns

VERIFIERS = """
import json, sys
from verifiers.v1.trace import WireTrace
for line in open(sys.argv[1]):
    trace = WireTrace.model_validate(json.loads(line))
    (branch,) = trace.branches
    print(json.dumps({"ids": branch.token_ids, "mask": branch.sampled_mask,
                      "logprobs": branch.logprobs, "reward": trace.reward,
                      "versions": trace.info["versions"]}))
"""
OPENENV = """
import json, sys
from openenv.core.harness.training import TrainingTrace
for line in open(sys.argv[1]):
    trace = TrainingTrace.model_validate_json(line)
    turn = trace.turns[-1]
    print(json.dumps({"ids": turn.prompt_token_ids + turn.completion_token_ids,
                      "logprobs": sum((each.per_token_logps for each in trace.turns), []),
                      "turns": len(trace.turns), "versions": turn.metadata["versions"]}))
"""
SAMPLE = two_turns()
SAMPLED = [value for value, on in zip(SAMPLE.logprobs, SAMPLE.sampled_mask, strict=True) if on]
VERSIONS = [[span.version, span.start, span.end] for span in SAMPLE.versions]


def read_by(script: str, form: str, tmp_path: Path) -> dict[str, object]:
    """What the package in the clients' environment makes of the exported sample."""
    stored, out = tmp_path / "samples.jsonl", tmp_path / "out.jsonl"
    stored.write_bytes(SAMPLE.to_json() + b"\n")
    command = [sys.executable, "-m", "lockstep", "export", "samples", str(stored), "--format", form]
    subprocess.run([*command, "-o", str(out)], check=True, stdout=subprocess.DEVNULL, timeout=60)
    done = subprocess.run(
        [PYTHON, "-c", script, out], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    read: dict[str, object] = json.loads(done.stdout)
    return read


def test_verifiers_reads_the_branch_that_was_exported(tmp_path: Path) -> None:
    read = read_by(VERIFIERS, "verifiers", tmp_path)
    assert read["ids"] == SAMPLE.token_ids
    assert read["mask"] == SAMPLE.sampled_mask
    logprobs = read["logprobs"]
    assert isinstance(logprobs, list)
    assert [value for value, on in zip(logprobs, SAMPLE.sampled_mask, strict=True) if on] == SAMPLED
    assert read["reward"] == SAMPLE.reward
    assert read["versions"] == VERSIONS


def test_openenv_takes_every_turn_that_was_exported(tmp_path: Path) -> None:
    read = read_by(OPENENV, "openenv", tmp_path)
    assert read["ids"] == SAMPLE.token_ids
    assert read["logprobs"] == SAMPLED
    assert read["turns"] == 2
    assert read["versions"] == VERSIONS
