"""Samples are read from the rollout formats of other programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.explain.read_samples import read_samples
from lockstep.export.exported import ExportedSample
from lockstep.export.traces import openenv_trace, verifiers_trace
from lockstep.tokens import Sample, VersionSpan
from lockstep.tokens.errors import BadRequest

SAMPLE = Sample(
    token_ids=[1, 2, 3, 4, 5, 6, 7],
    sampled_mask=[False, False, True, True, False, True, True],
    logprobs=[0.0, 0.0, -1.0, -2.0, 0.0, -3.0, -4.0],
    versions=(VersionSpan("v1", 2, 4), VersionSpan("v1", 5, 7)),
    temperature=0.7,
    logprob_mode="processed",
)
TURNS: list[dict[str, Any]] = [
    {"prompt_ids": [1, 2], "completion_ids": [3, 4], "logprobs": [-1.0, -2.0]},
    {"prompt_ids": [1, 2, 3, 4, 5], "completion_ids": [6, 7], "logprobs": [-3.0, -4.0]},
]
EXPORTED = ExportedSample(sample=SAMPLE, source="run", index=0)


@pytest.mark.parametrize(
    "line",
    [
        json.loads(SAMPLE.to_json()),
        verifiers_trace(EXPORTED, lambda ids: "text"),
        openenv_trace(EXPORTED),
        {"prompt_ids": [1, 2], "completion_ids": [3, 4, 5, 6, 7],
         "completion_mask": [1, 1, 0, 1, 1], "completion_logprobs": [-1, -2, 0, -3, -4]},
        {"steps": TURNS},
        {"trajectories": [{"steps": TURNS}]},
    ],
    ids=["lockstep", "verifiers", "openenv", "prime-rl and TRL", "rllm", "rllm episode"],
)  # fmt: skip
def test_each_format_gives_the_same_tokens(line: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(json.dumps(line) + "\n")
    (sample,) = read_samples(path)
    assert sample.token_ids == SAMPLE.token_ids
    assert sample.sampled_mask == SAMPLE.sampled_mask
    assert sample.logprobs == SAMPLE.logprobs


def test_a_line_that_is_no_sample_is_named(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(SAMPLE.to_json().decode() + '\n{"prompt_ids": [1]}\n')
    with pytest.raises(BadRequest, match=r"line 2 of .* has no completion_token_ids"):
        read_samples(path)
    with pytest.raises(BadRequest, match="neither a file"):
        read_samples(tmp_path / "missing")
