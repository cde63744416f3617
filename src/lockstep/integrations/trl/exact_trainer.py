"""Trainers whose logprobs equal the workers': when that is possible, and how it is measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lockstep.tokens import Completion
from lockstep.tokens.errors import Conflict, NotExact


def why_not_exact(trainer: Any) -> str | None:
    """Return why this trainer's logprobs cannot equal the engine's; None if they can."""
    model, args = trainer.model, trainer.args
    if model.device.type != "cpu" or model.dtype != torch.float32:
        return f"its model is {model.dtype} on {model.device.type}: expected float32 on a CPU"
    if trainer.accelerator.mixed_precision != "no":
        return f"it computes in {trainer.accelerator.mixed_precision}: set bf16=False, fp16=False"
    if args.use_liger_kernel or args.torch_compile:
        return "Liger kernels and torch.compile round differently: disable them"
    rates = [layer.p for layer in model.modules() if isinstance(layer, torch.nn.Dropout)]
    rates.append(getattr(model.config.get_text_config(), "attention_dropout", 0.0) or 0.0)
    return f"it trains with dropout {max(rates)}: set it to 0" if max(rates) else None


def same_distribution(args: Any) -> bool:
    """Whether the trainer computes logprobs at the temperature and in the mode of the sampler."""
    return not {"temperature", "logprob_mode"} & set(args.generation_kwargs or {})


def learn_in_one_pass(trainer: Any) -> None:
    """Skip the pass in which TRL recomputes the logprobs of what it has just sampled.

    They equal the sampler's bit for bit, so the importance-sampling correction would be 1. The
    training pass measures the difference under TRL's own metric names, and raises NotExact if there
    is one. Nothing changes for a trainer that takes several steps on the same rollouts.
    """
    args = trainer.args
    reused = args.gradient_accumulation_steps % (args.steps_per_generation * args.num_iterations)
    if reused or not same_distribution(args) or not trainer.vllm_importance_sampling_correction:
        return
    # With the correction on, TRL recomputes all logprobs in an extra pass before the loss.
    trainer.vllm_importance_sampling_correction = False
    score, compute = trainer._get_per_token_logps_and_entropies, trainer._compute_loss
    last: list[Any] = []

    def score_and_record(*arguments: Any, **options: Any) -> Any:
        last[:] = [score(*arguments, **options)]
        return last[0]

    def compute_loss(model: Any, inputs: dict[str, Any]) -> Any:
        loss = compute(model, inputs)
        _measure(trainer, last.pop()[0].detach(), inputs)
        return loss

    trainer._get_per_token_logps_and_entropies = score_and_record
    trainer._compute_loss = compute_loss


def measure_recomputed_logprobs(
    trainer: Any, take_sampled: Callable[[], list[Completion]], *, exact: bool
) -> None:
    """Compare the logprobs that an RLOOTrainer computes for its samples with the sampler's.

    The trainer learns from its own logprobs and never reads the sampler's. `take_sampled` returns
    the completions of a generation on its first call after it. With `exact` a difference raises
    NotExact.
    """
    score = trainer._get_per_token_logps_and_entropies
    required = exact and same_distribution(trainer.args)

    def score_and_measure(*arguments: Any, **options: Any) -> Any:
        scored = score(*arguments, **options)
        # The first pass after a generation is the one of the policy over the new samples.
        if sampled := take_sampled():
            _measure_rows(trainer, scored[0].detach(), sampled, required=required)
        return scored

    trainer._get_per_token_logps_and_entropies = score_and_measure


def _measure_rows(
    trainer: Any, logprobs: torch.Tensor, rows: list[Completion], *, required: bool
) -> None:
    if len(rows) != len(logprobs):
        raise Conflict(
            f"{type(trainer).__name__} scored {len(logprobs)} rows of {len(rows)} sampled ones: "
            "this version of TRL is not supported"
        )
    sampled, mask = torch.zeros_like(logprobs), torch.zeros_like(logprobs)
    for at, row in enumerate(rows):
        sampled[at, : len(row.logprobs)] = torch.tensor(row.logprobs)
        mask[at, : len(row.logprobs)] = 1
    _record(trainer, (logprobs - sampled) * mask, mask, required=required)


def _measure(trainer: Any, logprobs: torch.Tensor, inputs: dict[str, Any]) -> None:
    """Record the difference to the sampler's logprobs. Raises NotExact if there is one."""
    mask = inputs["completion_mask"]
    if "tool_mask" in inputs:
        mask = mask * inputs["tool_mask"]
    difference = (logprobs - inputs["sampling_per_token_logps"]) * mask
    _record(trainer, difference, mask, required=True)


def _record(trainer: Any, difference: torch.Tensor, mask: torch.Tensor, *, required: bool) -> None:
    difference = difference.abs()
    mean, worst = difference.sum() / mask.sum().clamp(min=1), difference.max()
    ratio = torch.exp(worst)
    gather = trainer.accelerator.gather
    measured = {
        "sampling_logp_difference/mean": gather(mean).mean(),
        "sampling_logp_difference/max": gather(worst).max(),
        "importance_sampling_ratio/min": 1 / gather(ratio).max(),
        "importance_sampling_ratio/mean": gather(torch.exp(mean)).mean(),
        "importance_sampling_ratio/max": gather(ratio).max(),
    }
    metrics = trainer._metrics["train" if trainer.model.training else "eval"]
    for name, value in measured.items():
        metrics[f"sampling/{name}"].append(value.item())
    if required and measured["sampling_logp_difference/max"] > 0:
        raise NotExact(
            f"the trainer's logprobs differ from the sampler's by {worst.item():.3g}, but an exact "
            "trainer must match: attach with exact=False, which corrects for the difference"
        )
