"""A training run whose gateway and workers know only URLs in a store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.checkpoint.delta.record import read_link
from lockstep.checkpoint.stores.fetch import local_checkpoint
from lockstep.checkpoint.validate import Checkpoint
from lockstep.tokens.errors import BadRequest
from lockstep.train import TrainConfig, Trainer, write_report
from lockstep.train.step_store import StepStore
from tests.checkpoint.delta.deltas_on_disk import full, moved, same
from tests.checkpoint.weights_on_disk import tensors
from tests.processes import TOKEN, ServeProcess
from tests.stores.s3_server import SECRET, S3Server
from tests.train.conftest import run_config


@pytest.mark.exact_arithmetic
async def test_a_run_publishes_its_steps_through_a_store_as_deltas(
    s3: S3Server, tmp_path: Path
) -> None:
    store = s3.url("trained")
    served = ServeProcess(
        "--workers", "1", "--sessions", "memory", "--checkpoint-root", store,
        "--worker-args", f"--max-model-len 256 --checkpoint-root {store}",
        "--state-dir", str(tmp_path / "state"), XDG_CACHE_HOME=str(tmp_path / "served-cache"),
        **s3.environ,
    )  # fmt: skip
    try:
        # Such a rate changes the low bits of float32 weights, as RL does those of bfloat16.
        config = run_config(tmp_path / "run", publish={"store": store}, learner={"lr": 1e-7})
        result = await Trainer(config, served.url, served.admin_url, TOKEN).run()
    finally:
        served.stop()
    assert [step.version for step in result.steps] == ["step-1", "step-2", "step-3"]
    assert result.max_difference == 0.0
    for step in result.steps:
        assert step.more["published_bytes"] < step.more["published_full_bytes"] / 2
    last = tmp_path / "run" / "checkpoints" / "step-3"
    names = {path.name for path in (s3.root / "weights" / "trained").iterdir()}
    assert {name.rpartition("-")[0] for name in names} == {f"step-{n}" for n in range(4)}
    (name,) = (name for name in names if name.startswith("step-3-"))
    with local_checkpoint(f"{store}/{name}") as local:
        stored = Checkpoint.validate(local.directory, roots=(local.root,))
    assert stored.digest == Checkpoint.validate(last, roots=(last,)).digest
    page = write_report(tmp_path / "run").read_text()
    assert "Bytes published" in page
    written = json.dumps([path.read_text() for path in (tmp_path / "run").glob("*.json*")])
    assert SECRET not in written


def test_a_stored_chain_has_full_checkpoints_in_between(s3: S3Server, tmp_path: Path) -> None:
    store = StepStore(s3.url("anchored"), deltas=True, anchor_every=2)
    contents = [tensors()]
    urls = []
    for step in range(5):
        directory = full(tmp_path / f"step-{step}", contents[-1])
        stored = store.put(directory)
        assert store.put(directory) == stored
        urls.append(stored.url)
        contents.append(moved(contents[-1], step))
    again = StepStore(s3.url("anchored"), deltas=True, anchor_every=2)
    assert again.put(tmp_path / "step-1").url == urls[1]
    forms = []
    for step, url in enumerate(urls):
        with local_checkpoint(url) as local:
            assert same(local.directory, contents[step])
            forms.append(read_link(local.directory) is not None)
    assert forms == [False, True, False, True, False]
    assert not list(tmp_path.glob(".step-*"))


def test_adapters_are_not_published_through_a_store() -> None:
    with pytest.raises(BadRequest, match=r"publish\.store is 's3://bucket/run'"):
        TrainConfig.of({"publish": {"store": "s3://bucket/run"}, "learner": {"lora_rank": 4}})
