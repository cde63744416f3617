"""The trained adapter: the engine's logprobs bit for bit, gradients, and restored states."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lockstep.chain.records import Chain
from lockstep.engine import exact
from lockstep.integrations.draws import DrawnRows
from lockstep.integrations.tinker.protocol.json_bodies import AdamParams
from lockstep.integrations.tinker.protocol.protobuf_messages import (
    Datum,
    ForwardBackwardRequest,
    Tensor,
)
from lockstep.integrations.tinker.training.lora_tensors import LoraModel, LoraSettings
from lockstep.integrations.tinker.training.training_chain import TrainingChain
from lockstep.integrations.tinker.training.training_model import TrainingModel
from lockstep.models import bundled
from lockstep.replay import audit
from lockstep.tokens import Completion
from lockstep.tokens.errors import BadRequest, CheckpointError, Conflict
from tests.engine.rig import Rig, ids

pytestmark = pytest.mark.exact_arithmetic

STEP = AdamParams(learning_rate=1e-2)


def load() -> Any:
    return AutoModelForCausalLM.from_pretrained(bundled("tiny"), dtype=torch.float32)


@pytest.fixture(scope="module")
def base() -> LoraModel:
    return LoraModel(exact.prepare(load()), is_exact=True, max_rank=64)


def trainer(base: LoraModel, **settings: Any) -> TrainingModel:
    return TrainingModel(base, LoraSettings(**{"rank": 8, "seed": 1, **settings}), 4096)


def tensor(values: Any) -> Tensor:
    array = np.asarray(values)
    kind = 2 if array.dtype.kind == "i" else 1
    data = array.astype("<i8" if kind == 2 else "<f4").tobytes()
    return Tensor(data, kind, array.shape)


def datum(at: int, length: int) -> Datum:
    tokens = ids(at, length)
    weights = np.ones(length - 1) * 0.1
    return Datum(
        tuple(tokens[:-1]), {"target_tokens": tensor(tokens[1:]), "weights": tensor(weights)}
    )


def chunk(*data: Datum, seq: int = 1, **more: Any) -> ForwardBackwardRequest:
    return ForwardBackwardRequest(
        "m", seq, data, **{"loss_fn": "cross_entropy", "config": {}, "forward_only": False, **more}
    )


def taught(base: LoraModel, **settings: Any) -> TrainingModel:
    """A trainer after two steps, so that both factors of each update are nonzero."""
    model = trainer(base, **settings)
    for _ in range(2):
        model.forward_backward(chunk(datum(1, 40), datum(2, 17)))
        model.optim_step(STEP)
    return model


def gradients(model: TrainingModel) -> list[torch.Tensor]:
    return [each.grad.clone() for each in model.tensors.parameters if each.grad is not None]


@pytest.mark.parametrize("rank", [1, 8, 32])
def test_the_engine_serves_the_trainers_logprobs_bit_for_bit(
    base: LoraModel, tmp_path: Path, rank: int
) -> None:
    model = taught(base, rank=rank)
    model.save_for_sampler(tmp_path, "s")
    rig = Rig(bundled("tiny"), max_seqs=6, max_batch_tokens=64)
    rig.adopt("s", tmp_path)
    assert rig.core.served.adapter("s").adapts_head
    sampled = [rig.submit(ids(i, 9 + 13 * i), adapter="s", seed=i, max_tokens=9) for i in range(5)]
    rig.run()
    sequences = [ids(i, 9 + 13 * i) + each.one.token_ids for i, each in enumerate(sampled)]
    data = [
        Datum(
            tuple(one[:-1]),
            {"target_tokens": tensor(one[1:]), "weights": tensor(np.ones(len(one) - 1))},
        )
        for one in sequences
    ]
    rows = model.forward_backward(chunk(*data, forward_only=True)).logprobs
    for row, each in zip(rows, sampled, strict=True):
        assert row[-len(each.one.logprobs) :].tolist() == each.one.logprobs


@pytest.mark.parametrize(
    ("flags", "targets"),
    [
        ({"train_mlp": False, "train_unembed": False}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ({"train_attn": False, "train_unembed": False}, {"gate_proj", "up_proj", "down_proj"}),
        ({"train_attn": False, "train_mlp": False}, {"lm_head"}),
    ],
)
def test_only_the_requested_modules_are_trained(
    base: LoraModel, flags: dict[str, bool], targets: set[str]
) -> None:
    model = trainer(base, **flags)
    assert {name.rpartition(".")[2] for name in model.tensors.pairs} == targets


def test_losses_and_gradients_are_those_of_plain_torch(base: LoraModel) -> None:
    model = taught(base)
    result = model.forward_backward(chunk(datum(3, 30), datum(4, 21)))
    own = load().requires_grad_(False)
    pairs = [
        tuple(each.detach().clone().requires_grad_() for each in pair)
        for pair in model.tensors.pairs.values()
    ]
    for name, (a, b) in zip(model.tensors.pairs, pairs, strict=True):
        own.get_submodule(name).register_forward_hook(
            lambda _, x, out, a=a, b=b: out + x[0] @ a.T @ b.T * model.tensors.scaling
        )
    total = torch.zeros(())
    for each in (datum(3, 30), datum(4, 21)):
        logits = own(torch.tensor([each.tokens])).logits[0]
        targets = torch.tensor(each.inputs["target_tokens"].array("t"))
        total += torch.nn.functional.cross_entropy(logits, targets, reduction="sum") * 0.1
    total.backward()
    assert result.metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-5)
    plain = [each.grad for pair in pairs for each in pair]
    for got, expected in zip(gradients(model), plain, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


def test_a_step_is_that_of_adamw(base: LoraModel) -> None:
    model = trainer(base)
    copies = [each.detach().clone().requires_grad_() for each in model.tensors.parameters]
    params = AdamParams(
        learning_rate=3e-3, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, grad_clip_norm=0.01
    )
    plain = torch.optim.AdamW(copies, lr=3e-3, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    for _ in range(3):
        model.forward_backward(chunk(datum(1, 40)))
        for copy, grad in zip(copies, gradients(model), strict=True):
            copy.grad = grad
        torch.nn.utils.clip_grad_norm_(copies, 0.01)
        plain.step()
        assert model.optim_step(params)["grad_norm"] > 0.01
        assert not gradients(model)
    for own, copy in zip(model.tensors.parameters, copies, strict=True):
        assert torch.equal(own, copy)


def test_several_chunks_are_one_call_bit_for_bit(base: LoraModel) -> None:
    data = [datum(at, 5 + at % 9) for at in range(150)]
    whole, parts = trainer(base), trainer(base)
    whole.forward_backward(chunk(*data))
    for start in (0, 64, 128):
        parts.forward_backward(chunk(*data[start : start + 64]))
    assert all(map(torch.equal, gradients(whole), gradients(parts)))


def test_a_forward_leaves_gradients_alone(base: LoraModel) -> None:
    model = trainer(base)
    model.forward_backward(chunk(datum(1, 40)))
    before = gradients(model)
    model.forward_backward(chunk(datum(2, 40), forward_only=True))
    assert all(map(torch.equal, before, gradients(model)))


@pytest.mark.failure_mode("F81")
def test_a_failed_chunk_leaves_no_gradient_and_fails_the_next_step(
    base: LoraModel,
) -> None:
    model = trainer(base)
    model.forward_backward(chunk(datum(1, 40)))
    before, weights = gradients(model), [p.detach().clone() for p in model.tensors.parameters]
    good = datum(2, 70)
    huge = replace(good, inputs=good.inputs | {"weights": tensor(np.full(69, 3e38))})
    data = [datum(at, 9) for at in range(64)]
    with pytest.raises(BadRequest, match="the loss is"):
        model.forward_backward(chunk(*data, huge, seq=7))
    assert all(map(torch.equal, before, gradients(model)))
    with pytest.raises(Conflict, match="seq_id 7 failed"):
        model.optim_step(STEP)
    assert all(map(torch.equal, weights, model.tensors.parameters))
    assert not gradients(model)
    model.forward_backward(chunk(datum(1, 40)))
    assert model.optim_step(STEP)["grad_norm"] > 0


def test_weights_and_moments_are_restored(base: LoraModel, tmp_path: Path) -> None:
    model = taught(base)
    model.save(tmp_path)
    both, weights_only = trainer(base, seed=9), trainer(base, seed=9)
    both.load(tmp_path, optimizer=True)
    weights_only.load(tmp_path, optimizer=False)
    for each in (model, both, weights_only):
        each.forward_backward(chunk(datum(5, 30)))
        each.optim_step(STEP)
    assert all(map(torch.equal, model.tensors.parameters, both.tensors.parameters))
    assert not all(map(torch.equal, model.tensors.parameters, weights_only.tensors.parameters))
    with pytest.raises(CheckpointError, match="rank and train_"):
        trainer(base, rank=4).load(tmp_path, optimizer=False)


def test_many_targets_at_one_position_give_a_matrix(base: LoraModel) -> None:
    model = taught(base)
    tokens = ids(1, 12)
    targets = np.stack((tokens[1:], tokens[:-1]), axis=1)
    deep = Datum(
        tuple(tokens[:-1]),
        {"target_tokens": tensor(targets), "weights": tensor(np.ones((11, 2)))},
    )
    (rows,) = model.forward_backward(chunk(deep, forward_only=True)).logprobs
    (row,) = model.forward_backward(chunk(datum(1, 12), forward_only=True)).logprobs
    assert rows.shape == (11, 2)
    assert rows[:, 0].tolist() == row.tolist()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        ({"weights": tensor([1.0])}, r"weights has shape \(1,\): expected \(4,\)"),
        ({"target_tokens": tensor([600, 1, 2, 3])}, "integers from 0 to 511"),
        ({"target_tokens": tensor([0.0, 1.0, 2.0, 3.0])}, "integers from 0 to 511"),
        ({"target_tokens": tensor([1])}, r"has shape \(1,\) for 4 tokens"),
        ({"mask": tensor([1.0])}, "cross_entropy takes target_tokens, weights"),
        ({"weights": tensor([np.nan, 1, 1, 1])}, "only finite numbers"),
    ],
)
def test_wrong_data_is_an_error_that_names_the_field(
    base: LoraModel, spoil: dict[str, Tensor], says: str
) -> None:
    good = datum(1, 5)
    with pytest.raises(BadRequest, match=says):
        trainer(base).forward_backward(chunk(replace(good, inputs=good.inputs | spoil)))


def test_settings_that_cannot_be_trained_are_an_error(base: LoraModel) -> None:
    with pytest.raises(BadRequest, match="rank is 65: expected 1 to 64"):
        trainer(base, rank=65)
    with pytest.raises(BadRequest, match="nothing would be trained"):
        trainer(base, train_attn=False, train_mlp=False, train_unembed=False)
    with pytest.raises(BadRequest, match=r"adam_params\.beta2 is 1\.0"):
        AdamParams(beta2=1.0).check()


@pytest.mark.failure_mode("F100")
def test_tokens_of_a_truncated_distribution_are_rejected_by_their_options(base: LoraModel) -> None:
    """Only where their ratio counts: they may be examples, or earlier turns of what is learnt."""
    draws = DrawnRows()
    model = TrainingModel(base, LoraSettings(rank=8, seed=1), 4096, draws)
    engine = Rig(bundled("tiny"), logprob_mode="raw")
    whole = engine.generate(ids(1, 9), max_tokens=6, seed=1)
    cut = engine.generate(ids(2, 9), max_tokens=6, seed=1, top_p=0.9)
    draws.add(whole)
    draws.add(cut)

    def learn(own: Completion, first: int, loss_fn: str = "importance_sampling") -> None:
        tokens = [*own.prompt_ids, *own.token_ids, 7, 8]
        signal = np.where(np.arange(1, len(tokens)) >= first, 1.0, 0.0)
        inputs = {"target_tokens": tensor(tokens[1:]), "advantages": tensor(signal)}
        if loss_fn == "cross_entropy":
            inputs["weights"] = inputs.pop("advantages")
        else:
            inputs["logprobs"] = tensor(np.full(len(signal), -1.0))
        model.forward_backward(chunk(Datum(tuple(tokens[:-1]), inputs), loss_fn=loss_fn))

    learn(whole, 9)
    with pytest.raises(BadRequest, match=r"data\[0\] has tokens that were drawn with top_p 0\.9"):
        learn(cut, 9)
    learn(cut, 9, "cross_entropy")
    learn(cut, 15)


async def test_steps_are_recorded_and_an_audit_names_what_the_client_kept(
    base: LoraModel, tmp_path: Path
) -> None:
    model = trainer(base)
    directory = bundled("tiny")
    assert directory is not None
    model.chain = TrainingChain(tmp_path / "run", directory, LoraSettings(rank=8, seed=1))
    for step in range(2):
        model.forward_backward(chunk(datum(step, 9), seq=step))
        model.forward_backward(chunk(datum(step + 7, 9), seq=step))
        model.optim_step(STEP)
    (tmp_path / "saved").mkdir()
    model.save(tmp_path / "saved")
    model.load(tmp_path / "saved", optimizer=True)
    model.forward_backward(chunk(datum(5, 9)))
    model.optim_step(STEP)

    chain = Chain.read(tmp_path / "run")
    assert [link.kind for link in chain.links] == ["start", "step", "step", "load", "step"]
    assert [len(record["batch"]["calls"]) for record in chain.steps.values()] == [2, 2, 1]
    outcome = await audit(tmp_path / "run", chain_only=True)
    assert outcome.problems == []
    missing = set(outcome.missing)
    assert {"rewards", "tasks", "seeds", "samples.versions", "batch.advantages"} <= missing
    assert not {"learning.gradients", "learning.optimizer", "learning.weights"} & missing

    # The same calls leave the same digests.
    again = trainer(base)
    again.chain = TrainingChain(tmp_path / "again", directory, LoraSettings(rank=8, seed=1))
    again.forward_backward(chunk(datum(0, 9), seq=0))
    again.forward_backward(chunk(datum(7, 9), seq=0))
    again.optim_step(STEP)
    first = Chain.read(tmp_path / "again").steps[1]
    assert first["learning"] == chain.steps[1]["learning"]
    assert first["batch"] == chain.steps[1]["batch"]
