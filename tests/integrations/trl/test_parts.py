"""The parts of the TRL integration that need no TRL: rows, versions, weights, errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lockstep.integrations.trl import rollout_worker
from lockstep.integrations.trl.cpu import varlen_attention
from lockstep.integrations.trl.generation import LockstepGeneration, sample_row
from lockstep.integrations.trl.rollout_worker import LockstepRolloutWorker
from lockstep.integrations.trl.served_policy import ServedPolicy, check_mode
from lockstep.integrations.trl.sharded_model import check_sharding
from lockstep.integrations.trl.weight_transfer import LockstepWeightTransfer
from lockstep.models import bundled
from lockstep.tokens import Sample, VersionSpan
from lockstep.tokens.errors import BadRequest, BadVersions, CheckpointError, Conflict, RolloutFailed


def sample(mask: str, *versions: VersionSpan) -> Sample:
    """A sample whose tokens are 0, 1, 2 and so on; "x" marks those that were sampled."""
    sampled = [mark == "x" for mark in mask]
    return Sample(
        token_ids=list(range(len(mask))),
        sampled_mask=sampled,
        logprobs=[-0.5 if each else 0.0 for each in sampled],
        versions=versions,
    )


def test_a_completion_starts_at_the_first_sampled_token_and_masks_other_tokens() -> None:
    row = sample_row(sample("..xx.x", VersionSpan("a", 2, 4), VersionSpan("b", 5, 6)))
    assert row["prompt_ids"] == [0, 1]
    assert row["completion_ids"] == [2, 3, 4, 5]
    assert row["env_mask"] == [1, 1, 0, 1]
    assert row["logprobs"] == [-0.5, -0.5, 0.0, -0.5]
    with pytest.raises(RolloutFailed, match="without a sampled token"):
        sample_row(sample("..."))


def a_worker(policy: Any) -> LockstepRolloutWorker:
    return LockstepRolloutWorker(policy, [{"prompt": "Hi"}], lambda **_: [0.0])


async def test_a_rollout_has_the_version_of_its_oldest_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = SimpleNamespace(published=None)
    worker = a_worker(policy)
    for number, label in enumerate(("one", "two", "three"), start=1):
        policy.published = SimpleNamespace(label=label)
        worker.update_model_version(number)
    mixed = sample(".xxx", VersionSpan("three", 1, 2), VersionSpan("two", 2, 4))
    assert await worker._version(mixed) == 2
    # Tokens of an update that is not reported yet wait for its report.
    later = asyncio.create_task(worker._version(sample(".x", VersionSpan("four", 1, 2))))
    await asyncio.sleep(0.05)
    assert not later.done()
    policy.published = SimpleNamespace(label="four")
    worker.update_model_version(4)
    assert await later == 4
    monkeypatch.setattr(rollout_worker, "LABEL_SECONDS", 0.05)
    with pytest.raises(BadVersions, match="one ServedPolicy"):
        await worker._version(sample(".x", VersionSpan("a stranger's", 1, 2)))


def test_a_rollout_worker_that_failed_or_stalled_is_an_error() -> None:
    worker = a_worker(SimpleNamespace(published=None))
    worker.check_health(60.0)
    with pytest.raises(Conflict, match="no rollout has finished"):
        worker.check_health(-1.0)
    worker._failed = RolloutFailed("the environment raised")
    with pytest.raises(RolloutFailed, match="the environment raised"):
        worker.check_health(60.0)


async def test_a_reward_function_must_score_every_completion() -> None:
    worker = LockstepRolloutWorker(
        SimpleNamespace(published=None),  # type: ignore[arg-type]
        [{"prompt": "Hi"}],
        [lambda prompts, completions, **_: [1.0] * len(completions), lambda **_: [None, 2.0]],
    )
    replies = [[{"role": "assistant", "content": "a"}], [{"role": "assistant", "content": "b"}]]
    assert await worker._score({"prompt": "Hi"}, replies) == [1.0, 3.0]
    with pytest.raises(BadRequest, match="returned 2 values for 1 completions"):
        await worker._score({"prompt": "Hi"}, replies[:1])


class Recorded:
    """A policy that stores what was published."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def open(self) -> None:
        pass

    def publish(self, save: Any) -> None:
        save(self.directory, "step-0")


def weights(left_out: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    model = AutoModelForCausalLM.from_pretrained(bundled("tiny"), dtype=torch.float32)
    for name, tensor in model.named_parameters():
        if name != left_out:
            yield name, tensor.detach() * 1.01


def test_a_missing_tensor_is_an_error_before_it_is_served(tmp_path: Path) -> None:
    policy: Any = Recorded(tmp_path / "step-0")
    transfer = LockstepWeightTransfer(policy, str(bundled("tiny")))
    transfer.init_weight_transfer()
    sent = weights(left_out="model.norm.weight")
    with pytest.raises(CheckpointError, match=r"missing model\.norm\.weight"):
        transfer.send_weights(sent)
    assert next(sent, None) is None, "the iterator must be taken to its end"
    with pytest.raises(CheckpointError, match=r"unexpected model\.strange"):
        transfer.send_weights(iter([*weights(), ("model.strange", torch.zeros(2))]))
    assert not policy.directory.exists()
    transfer.send_weights(weights())
    assert (policy.directory / "STABLE").exists()
    assert (policy.directory / "probe.safetensors").exists()


def test_raw_logprobs_at_another_temperature_are_an_error() -> None:
    check_mode("raw", 1.0)
    check_mode("processed", 0.7)
    with pytest.raises(Conflict, match="processed"):
        check_mode("raw", 0.7)


def test_a_trainer_that_accelerate_shards_is_an_error_with_the_way_out() -> None:
    class GRPOTrainer:
        accelerator = SimpleNamespace(distributed_type="DistributedType.FSDP")

    with pytest.raises(BadRequest, match=r"distributed by FSDP.*attach\(trainer, shard=True\)"):
        LockstepGeneration().attach(GRPOTrainer())


def trainer_of(processes: int, plugin: object = None, **model: object) -> Any:
    state = SimpleNamespace(fsdp_plugin=plugin)
    accelerator = SimpleNamespace(num_processes=processes, state=state)
    return SimpleNamespace(
        accelerator=accelerator, args=SimpleNamespace(), model=SimpleNamespace(**model)
    )


def test_who_asked_accelerate_for_fsdp_on_a_cpu_is_told_of_ddp(
    caplog: pytest.LogCaptureFixture,
) -> None:
    check_sharding(trainer_of(2), shard=False)
    assert caplog.text == ""
    check_sharding(trainer_of(2, plugin=object()), shard=False)
    assert "accelerate ignores FSDP on a CPU and trains with DDP" in caplog.text


def test_one_process_and_adapters_are_not_sharded() -> None:
    with pytest.raises(BadRequest, match="one process: start it with torchrun"):
        check_sharding(trainer_of(1), shard=True)
    with pytest.raises(BadRequest, match="adapters are not sharded"):
        check_sharding(trainer_of(2, peft_config={}), shard=True)


def test_calls_before_open_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(Conflict, match="not connected"):
        ServedPolicy(checkpoints=tmp_path).publish(lambda *_: None)


def test_cpu_attention_is_causal_within_each_sequence() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(4, heads, 8) for heads in (4, 2, 2))
    # Two sequences: three queries on three keys, and one query that goes on from two keys.
    path = torch.tensor([0, 1, 2, 0, 1, 3])
    starts = torch.tensor([0, 3, 4]), torch.tensor([0, 3, 6])
    out = varlen_attention(query, key[path], value[path], *starts, 3, 3)
    chain = [0, 1, 3]
    alone = varlen_attention(
        query[chain], key[chain], value[chain], torch.tensor([0, 3]), torch.tensor([0, 3]), 3, 3
    )
    torch.testing.assert_close(out[3], alone[2])
    with pytest.raises(ValueError, match="GPU kernel"):
        varlen_attention(query, key, value, *starts, 3, 3, window_size=(4, 0))
