"""An exported dataset as Hugging Face's own library loads it; and a session of a live gateway."""

from __future__ import annotations

import json
import os
import struct
import subprocess
from pathlib import Path
from typing import Any

import aiohttp

from lockstep.tokens import Sample
from tests.export.samples import two_turns
from tests.processes import TOKEN, ServeProcess
from tests.sinks.test_trackers import PYTHON

SERVE = ("--sessions", "memory", "--worker-args", "--max-model-len 256")
LOAD = """
import json, sys
from datasets import load_dataset

rows = load_dataset(sys.argv[1], split="train")
for row in rows:
    print(json.dumps(row, default=bytes.hex))
"""


def export(*arguments: str | Path, **environ: str) -> dict[str, Any]:
    clean = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], **environ}
    command = [PYTHON, "-m", "lockstep", "export", "samples", *arguments]
    done = subprocess.run(
        command, env=clean, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def load(directory: Path, home: Path) -> list[dict[str, Any]]:
    environ = {"HOME": str(home), "HF_HUB_OFFLINE": "1", "HF_HOME": str(home / "hf")}
    done = subprocess.run(
        [PYTHON, "-c", LOAD, directory],
        env=environ, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "gnoring" not in done.stderr, "the card is read without complaint"
    return [json.loads(line) for line in done.stdout.splitlines()]


def bits(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def check_equal(row: dict[str, Any], sample: Sample) -> None:
    """The row has the ids, the bits of the logprobs, and the versions of the sample."""
    assert row["token_ids"] == sample.token_ids
    assert row["sampled_mask"] == sample.sampled_mask
    assert bits(row["logprobs"]) == bits(sample.logprobs)
    if sample.support is not None:
        stored = row["support"]
        assert stored["counts"] == bytes(sample.support.counts).hex()
        assert stored["data"] == bytes(sample.support.data).hex()
    spans = [(span["version"], span["start"], span["end"]) for span in row["versions"]]
    assert spans == [(span.version, span.start, span.end) for span in sample.versions]


def test_datasets_loads_what_was_exported_bit_for_bit(tmp_path: Path) -> None:
    stored = tmp_path / "samples.jsonl"
    samples = [two_turns(seed) for seed in range(300)]  # more than one row group
    stored.write_bytes(b"".join(sample.to_json() + b"\n" for sample in samples))
    out = tmp_path / "dataset"
    assert export(stored, "--format", "parquet", "-o", out)["samples"] == 300
    assert sorted(str(each.relative_to(out)) for each in out.rglob("*.*")) == [
        "README.md", "data/train-00000-of-00001.parquet",
    ]  # fmt: skip
    rows = load(out, tmp_path)
    assert len(rows) == 300
    for row, sample in zip(rows, samples, strict=True):
        check_equal(row, sample)
    (row, sample) = rows[7], samples[7]
    assert sample.experts is not None
    assert bytes.fromhex(row["experts"]["data"]) == bytes(sample.experts.data)
    assert tuple(row["experts"]["shape"]) == sample.experts.shape
    assert row["trained_in"] == [{"sample": 0, "start": 1, "end": 3}]
    assert row["stops"] == [{"start": 8, "end": 9}]
    assert json.loads(row["notes"]) == list(sample.notes)
    plain = ("reward", "kind", "parent", "depth", "harness", "temperature", "logprob_mode")
    assert {name: row[name] for name in plain} == {name: getattr(sample, name) for name in plain}


async def test_a_session_of_a_running_gateway_is_exported(
    served_gateway: ServeProcess, tmp_path: Path
) -> None:
    body = {"messages": [{"role": "user", "content": "Reverse: 40213"}], "max_tokens": 8}
    async with aiohttp.ClientSession(headers={"x-session-id": "exported"}) as session:
        async with session.post(f"{served_gateway.url}/v1/chat/completions", json=body) as response:
            assert response.status == 200
    options = ("exported", "--url", served_gateway.admin_url)
    environ = {"LOCKSTEP_ADMIN_TOKEN": TOKEN}
    lines, out = tmp_path / "lines.jsonl", tmp_path / "dataset"
    assert export(*options, "-o", lines, **environ)["samples"] == 1
    assert export(*options, "--format", "parquet", "-o", out, **environ)["samples"] == 1
    sample = Sample.from_json(lines.read_bytes())
    assert sum(sample.sampled_mask) > 0
    (row,) = load(out, tmp_path)
    check_equal(row, sample)
    assert row["source"] == "exported"
