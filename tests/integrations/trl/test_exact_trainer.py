"""TRL's logprobs with the engine's bits: packed rows, a single pass, and its preconditions."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lockstep.engine import exact
from lockstep.integrations.trl.exact_head import _chosen, pack_batch
from lockstep.integrations.trl.exact_trainer import learn_in_one_pass, why_not_exact
from lockstep.models import bundled
from lockstep.tokens.errors import NotExact

PROMPT, OTHER = [1, 40, 41, 42, 43, 44, 45], [1, 50, 51]
ROWS = [(PROMPT, [60, 61, 62]), (PROMPT, [63]), (OTHER, [64, 65, 66, 67, 68]), (OTHER, [69, 70])]


@pytest.fixture(scope="module")
def model() -> Any:
    loaded = AutoModelForCausalLM.from_pretrained(bundled("tiny"), dtype=torch.float32)
    return exact.prepare(loaded, strict=False)


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, mask and labels as TRL makes them: prompts padded left, completions right."""
    ids = torch.zeros(len(ROWS), 12, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for at, (prompt, completion) in enumerate(ROWS):
        row = slice(7 - len(prompt), 7 + len(completion))
        ids[at, row], mask[at, row] = torch.tensor(prompt + completion), 1
        labels[at, 7 : row.stop] = torch.tensor(completion)
    return ids, mask, labels


def test_packed_rows_have_the_logprobs_of_each_row_alone(model: Any) -> None:
    ids, mask, labels = batch()
    labels[0, 0] = PROMPT[0]  # nothing stands before it: it has no logprob
    packed = pack_batch(model, ids, mask, labels, multiple=1)
    assert packed is not None
    # Four rows of two prompts: each prompt is there once, and no padding.
    assert len(packed.rows.ids) == len(PROMPT) + len(OTHER) + 3 + 1 + 5 + 2
    logprobs, entropy = packed.score(model, labels, 0.8)
    assert logprobs.shape == entropy.shape == (4, 11)
    for at, (prompt, completion) in enumerate(ROWS):
        alone = exact.token_logprobs(model, prompt + completion, 0.8)[len(prompt) - 1 :]  # type: ignore[index]
        assert torch.equal(logprobs[at, 6 : 6 + len(completion)], alone)
        assert not logprobs[at, :6].any()
        assert not logprobs[at, 6 + len(completion) :].any()
        assert bool((entropy[at, 6 : 6 + len(completion)] > 0).all())


def test_gradients_flow_through_prompts_that_are_computed_once(model: Any) -> None:
    ids, mask, labels = batch()
    packed = pack_batch(model, ids, mask, labels)
    assert packed is not None
    assert len(packed.rows.ids) % exact.row_multiple_of(model) == 0
    weight = model.model.embed_tokens.weight
    packed.score(model, labels, 1.0)[0].sum().backward()
    shared, weight.grad = weight.grad.clone(), None
    sum(
        exact.token_logprobs(model, prompt + completion)[len(prompt) - 1 :].sum()  # type: ignore[index, misc]
        for prompt, completion in ROWS
    ).backward()  # type: ignore[union-attr]
    alone, weight.grad = weight.grad.clone(), None
    assert torch.allclose(shared, alone, atol=1e-5)


def test_padding_between_tokens_and_rows_without_labels_are_not_packed(model: Any) -> None:
    ids, mask, labels = batch()
    assert pack_batch(model, ids, mask, torch.full_like(labels, -100)) is None
    mask[2, 8] = 0
    assert pack_batch(model, ids, mask, labels) is None


def test_entropy_is_that_of_the_tempered_distribution() -> None:
    logits = torch.tensor([[0.0, 0.0], [4.0, 0.0]])
    logprobs, entropy = _chosen(logits, torch.tensor([1, 0]), 2.0)
    assert logprobs.tolist() == pytest.approx([-0.6931, -0.1269], abs=1e-4)
    assert entropy.tolist() == pytest.approx([0.6931, 0.3653], abs=1e-4)


class Trainer:
    """The relevant part of a GRPOTrainer; its logprobs differ by `off` from the sampler's."""

    def __init__(self, off: float = 0.0, **changes: Any) -> None:
        plain: dict[str, Any] = {
            "gradient_accumulation_steps": 1, "steps_per_generation": 1, "num_iterations": 1,
            "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0,
            "generation_kwargs": None,
        }  # fmt: skip
        self.args = SimpleNamespace(**plain | changes)
        self.vllm_importance_sampling_correction = True
        self.accelerator = SimpleNamespace(gather=lambda value: value[None])
        self.model = SimpleNamespace(training=True)
        self._metrics: Any = {"train": defaultdict(list)}
        self.off = off

    def _get_per_token_logps_and_entropies(self, _: Any) -> Any:
        return torch.tensor([[-1.0, -2.0 + self.off, -3.0, -9.0]]), None, None

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> float:
        self._get_per_token_logps_and_entropies(model)
        return 0.5


# The third token is the environment's, the last one padding.
INPUTS = {
    "completion_mask": torch.tensor([[1, 1, 1, 0]]),
    "tool_mask": torch.tensor([[1, 1, 0, 0]]),
    "sampling_per_token_logps": torch.tensor([[-1.0, -2.0, 0.0, 0.0]]),
}


def test_in_one_pass_the_difference_is_measured_where_the_loss_is_computed() -> None:
    trainer = Trainer()
    learn_in_one_pass(trainer)
    assert not trainer.vllm_importance_sampling_correction
    assert trainer._compute_loss(trainer.model, INPUTS) == 0.5
    metrics = trainer._metrics["train"]
    assert metrics["sampling/sampling_logp_difference/max"] == [0.0]
    assert metrics["sampling/importance_sampling_ratio/max"] == [1.0]


def test_in_one_pass_a_difference_is_an_error_and_never_left_uncorrected() -> None:
    trainer = Trainer(off=1e-6)
    learn_in_one_pass(trainer)
    with pytest.raises(NotExact, match="exact=False"):
        trainer._compute_loss(trainer.model, INPUTS)
    assert trainer._metrics["train"]["sampling/sampling_logp_difference/max"][0] > 0


@pytest.mark.parametrize(
    "changes",
    [{"num_iterations": 2}, {"steps_per_generation": 2},
     {"generation_kwargs": {"temperature": 0.5}}],
)  # fmt: skip
def test_a_trainer_that_needs_recomputed_logprobs_keeps_the_pass(
    changes: dict[str, Any],
) -> None:
    trainer = Trainer(**changes)
    learn_in_one_pass(trainer)
    assert trainer.vllm_importance_sampling_correction


def a_trainer(model: Any, **changes: Any) -> Any:
    args = {"use_liger_kernel": False, "torch_compile": False}
    return SimpleNamespace(
        model=model,
        accelerator=SimpleNamespace(mixed_precision=changes.pop("mixed_precision", "no")),
        args=SimpleNamespace(**args | changes),
    )


def test_trainers_that_round_differently_cannot_be_exact(model: Any) -> None:
    assert why_not_exact(a_trainer(model)) is None
    assert "bf16" in str(why_not_exact(a_trainer(model, mixed_precision="bf16")))
    assert "Liger" in str(why_not_exact(a_trainer(model, use_liger_kernel=True)))
    assert "torch.compile" in str(why_not_exact(a_trainer(model, torch_compile=True)))
    half = AutoModelForCausalLM.from_pretrained(bundled("tiny"), dtype=torch.bfloat16)
    assert "bfloat16" in str(why_not_exact(a_trainer(half)))
    half.float().dropout = torch.nn.Dropout(0.1)
    assert "dropout 0.1" in str(why_not_exact(a_trainer(half)))
