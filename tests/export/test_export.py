"""`lockstep export samples`: ids, logprobs and versions are preserved."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.export.exported import ExportedSample, samples_of_run
from lockstep.export.traces import openenv_trace, verifiers_trace
from lockstep.tokens import Sample
from lockstep.train.records.transcript import _drawn
from tests.export.samples import two_turns


def export(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lockstep", "export", "samples", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "samples.jsonl"
    path.write_bytes(b"".join(two_turns(seed).to_json() + b"\n" for seed in range(3)))
    return path


def run_directory(where: Path, sample: Sample) -> Path:
    """A run directory with one stored sample."""
    versions: list[str | None] = [None] * len(sample.token_ids)
    for span in sample.versions:
        versions[span.start : span.end] = [span.version] * (span.end - span.start)
    row = {"step": 3, "env": "reverse", "reward": 0.5, "advantage": -0.25, "versions": versions,
           "token_ids": sample.token_ids, "sampled_mask": sample.sampled_mask,
           "logprobs": sample.logprobs, "workers": ["w0"], **_drawn(sample)}  # fmt: skip
    where.mkdir()
    (where / "samples.jsonl").write_text(json.dumps(row) + "\n")
    (where / "metrics.jsonl").write_text("")
    config = {"rollout": {"logprobs": "processed", "temperature": 0.7}}
    (where / "run.json").write_text(json.dumps({"config": config}))
    return where


def test_json_lines_give_back_equal_samples(stored: Path, tmp_path: Path) -> None:
    done = export(stored, "-o", tmp_path / "out.jsonl")
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "out.jsonl").read_bytes().splitlines()
    assert [Sample.from_json(line) for line in lines] == [two_turns(seed) for seed in range(3)]
    assert json.loads(done.stdout) == {
        "samples": 3, "format": "jsonl", "output": str(tmp_path / "out.jsonl"),
    }  # fmt: skip


def test_without_an_output_only_the_lines_are_on_stdout(stored: Path) -> None:
    done = export(stored)
    assert len([Sample.from_json(line) for line in done.stdout.splitlines()]) == 3
    assert done.stderr == ""


def test_samples_of_a_run_have_its_spans_and_its_sampling(tmp_path: Path) -> None:
    sample = two_turns()
    (exported,) = samples_of_run(run_directory(tmp_path / "run", sample))
    assert (exported.step, exported.advantage) == (3, -0.25)
    assert exported.sample.versions == sample.versions
    assert exported.sample.logprobs == sample.logprobs
    assert exported.sample.temperature == 0.7
    assert exported.sample.reward == 0.5
    assert (exported.sample.shaping, exported.sample.support) == (sample.shaping, sample.support)


def test_openenv_traces_have_a_turn_for_each_sampled_range() -> None:
    sample = two_turns()
    trace = openenv_trace(ExportedSample(sample=sample, source="s", index=0))
    one, two = trace["turns"]
    assert one["prompt_token_ids"] == sample.token_ids[:4]
    assert one["completion_token_ids"] == sample.token_ids[4:9]
    assert two["prompt_token_ids"] == sample.token_ids[:11]
    assert two["per_token_logps"] == sample.logprobs[11:]
    assert two["loss_mask"] == [0] * 11 + [1] * 3
    assert one["node_id"] != two["node_id"]
    assert sample.support is not None
    assert one["metadata"]["sampling_mask"] == sample.support.slice(4, 9).lists()


def test_the_nodes_of_a_verifiers_trace_add_up_to_the_sample() -> None:
    sample = two_turns()
    exported = ExportedSample(sample=sample, source="s", index=0)
    trace = verifiers_trace(exported, lambda ids: f"{len(ids)} tokens")
    nodes = trace["nodes"]
    assert [node["parent"] for node in nodes] == [None, 0, 1, 2]
    assert [node["sampled"] for node in nodes] == [False, True, False, True]
    assert sum((node["token_ids"] for node in nodes), []) == sample.token_ids
    assert sum((node["mask"] for node in nodes), []) == sample.sampled_mask
    assert nodes[1]["logprobs"] + nodes[3]["logprobs"] == [each for each in sample.logprobs if each]
    assert nodes[1]["message"] == {"role": "assistant", "content": "5 tokens"}
    assert trace["rewards"] == {"reward": {"score": 0.1}}
    assert sample.support is not None
    assert trace["info"]["sampling_mask"] == sample.support.lists()
    assert trace["info"]["support"] is None


@pytest.mark.failure_mode("F100")
def test_traces_say_where_the_sets_of_a_truncated_draw_are_missing() -> None:
    exported = ExportedSample(sample=replace(two_turns(), support=None), source="s", index=0)
    assert verifiers_trace(exported, str)["info"]["support"] == "absent"
    assert openenv_trace(exported)["turns"][0]["metadata"]["support"] == "absent"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--format", "parquet", "."], "--output"),
        (["."], "without a training run"),
        (["README.md"], "is not a sample"),
    ],
)
def test_a_failed_export_is_an_error_with_the_reason(arguments: list[str], says: str) -> None:
    done = export(*arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stdout == ""


def test_a_failed_export_leaves_no_file(stored: Path, tmp_path: Path) -> None:
    stored.write_bytes(stored.read_bytes() + b"{}\n")
    done = export(stored, "-o", tmp_path / "out.jsonl")
    assert done.returncode == 2
    assert "line 4" in done.stderr
    assert sorted(each.name for each in tmp_path.iterdir()) == ["samples.jsonl"]


def test_parquet_without_pyarrow_names_the_extra(stored: Path, tmp_path: Path) -> None:
    hide: dict[str, Any] = {"pyarrow": None}
    script = (
        f"import sys; sys.modules.update({hide!r}); sys.argv = ['lockstep', 'export', 'samples', "
        f"{str(stored)!r}, '--format', 'parquet', '-o', {str(tmp_path / 'out')!r}]\n"
        "from lockstep.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "lockstep-rl[export]" in done.stderr
