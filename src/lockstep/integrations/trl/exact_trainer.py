"""A GRPOTrainer whose logprobs are the workers' own: when that can be, and what it saves."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.tokens.errors import NotExact


def why_not_exact(trainer: Any) -> str | None:
    """What of this trainer keeps its logprobs from being the engine's; None where nothing does."""
    model, args = trainer.model, trainer.args
    if model.device.type != "cpu" or model.dtype != torch.float32:
        return f"its model is {model.dtype} on {model.device.type}, not float32 on a CPU"
    if trainer.accelerator.mixed_precision != "no":
        return f"it computes in {trainer.accelerator.mixed_precision}: set bf16=False, fp16=False"
    if args.use_liger_kernel or args.torch_compile:
        return "kernels of Liger and torch.compile round otherwise"
    dropped = [each.p for each in model.modules() if isinstance(each, torch.nn.Dropout)]
    dropped.append(getattr(model.config.get_text_config(), "attention_dropout", 0.0) or 0.0)
    return f"it trains with dropout {max(dropped)}" if max(dropped) else None


def samples_untruncated(args: Any) -> bool:
    """Whether the sampler's logprobs are those of the whole distribution, as TRL's are."""
    return (
        args.top_p == 1.0
        and not args.top_k
        and not args.min_p
        and args.repetition_penalty == 1.0
        and not args.generation_kwargs
    )


def learn_in_one_pass(trainer: Any) -> None:
    """Leaves out the pass in which TRL computes the logprobs of what it has just sampled.

    They are the sampler's, bit for bit, and so the correction by their ratio is 1. That they are
    is measured in the training pass itself, under the names that TRL has for it, and NotExact is
    raised where they are not. Nothing changes for a trainer that takes several steps of the same
    rollouts, or whose sampler truncates the distribution.
    """
    args = trainer.args
    several = args.gradient_accumulation_steps % (args.steps_per_generation * args.num_iterations)
    if several or not samples_untruncated(args) or not trainer.vllm_importance_sampling_correction:
        return
    trainer.vllm_importance_sampling_correction = False
    score, compute = trainer._get_per_token_logps_and_entropies, trainer._compute_loss
    last: list[Any] = []

    def scored(*arguments: Any, **options: Any) -> Any:
        last[:] = [score(*arguments, **options)]
        return last[0]

    def compute_loss(model: Any, inputs: dict[str, Any]) -> Any:
        loss = compute(model, inputs)
        _measure(trainer, last.pop()[0].detach(), inputs)
        return loss

    trainer._get_per_token_logps_and_entropies = scored
    trainer._compute_loss = compute_loss


def _measure(trainer: Any, logprobs: torch.Tensor, inputs: dict[str, Any]) -> None:
    """Notes how far these are from the sampler's. Raises NotExact where they are not the same."""
    mask = inputs["completion_mask"]
    if "tool_mask" in inputs:
        mask = mask * inputs["tool_mask"]
    difference = ((logprobs - inputs["sampling_per_token_logps"]) * mask).abs()
    mean, most = difference.sum() / mask.sum().clamp(min=1), difference.max()
    ratio = torch.exp(most)
    gather = trainer.accelerator.gather
    noted = {
        "sampling_logp_difference/mean": gather(mean).mean(),
        "sampling_logp_difference/max": gather(most).max(),
        "importance_sampling_ratio/min": 1 / gather(ratio).max(),
        "importance_sampling_ratio/mean": gather(torch.exp(mean)).mean(),
        "importance_sampling_ratio/max": gather(ratio).max(),
    }
    metrics = trainer._metrics["train" if trainer.model.training else "eval"]
    for name, value in noted.items():
        metrics[f"sampling/{name}"].append(value.item())
    if noted["sampling_logp_difference/max"] > 0:
        raise NotExact(
            f"the trainer's logprobs differ from the sampler's by {most.item():.3g}, and were to "
            "be the same: attach with exact=False, which corrects for the difference"
        )
