"""The losses of the API: sums over tokens and datums, never means, as it documents them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.tokens.errors import BadRequest

Inputs = Mapping[str, Tensor]
Config = Mapping[str, float]
POLICY_INPUTS = ("target_tokens", "logprobs", "advantages")
CLIPS = ("clip_low_threshold", "clip_high_threshold")
UNSUPPORTED = {
    "stable_reinforce": "it needs records of the sampler that this server does not keep",
    "custom": "it needs an uploaded graph; forward_backward_custom of the SDK works without",
}


@dataclass(frozen=True, slots=True)
class Loss:
    """One loss: the inputs that each datum must have, the numbers it takes, and its sum.

    `compute(logprobs, inputs, config)` has one datum's tensors of equal shapes. A default of None
    is a number that the caller must give.
    """

    inputs: tuple[str, ...]
    config: Mapping[str, float | None]
    compute: Callable[[Tensor, Inputs, Config], Tensor]

    def settings(self, name: str, config: Mapping[str, float | str]) -> dict[str, float]:
        """The numbers to compute with. Raises BadRequest for unknown, missing or odd ones."""
        for key, value in config.items():
            if key not in self.config or isinstance(value, str):
                known = ", ".join(self.config) or "none"
                raise BadRequest(
                    f"loss_fn_config.{key} is {value!r}: {name} takes these numbers: {known}",
                    param=f"loss_fn_config.{key}",
                )
        chosen: dict[str, float] = {}
        numbers: dict[str, float | str | None] = {**self.config, **config}
        for key, number in numbers.items():
            if not isinstance(number, float | int):
                raise BadRequest(
                    f"{name} needs the number loss_fn_config.{key}", param=f"loss_fn_config.{key}"
                )
            chosen[key] = float(number)
        return chosen


def loss_of(name: str) -> Loss:
    """The loss of that name. Raises BadRequest that lists those that there are."""
    if name in LOSSES:
        return LOSSES[name]
    why = UNSUPPORTED.get(name, f"there are {', '.join(LOSSES)}")
    raise BadRequest(f"loss_fn {name!r} is not supported: {why}", param="loss_fn")


def _ratio(logprobs: Tensor, inputs: Inputs) -> Tensor:
    """How much likelier each token has become, 1 where its advantage is 0.

    Prompts have logprobs of 0 there: a ratio that overflows would turn 0 advantage into NaN.
    """
    log_ratio = logprobs - inputs["logprobs"]
    counts = inputs["advantages"] != 0
    return torch.where(counts, log_ratio, torch.zeros_like(log_ratio)).exp()


def _clipped(ratio: Tensor, config: Config) -> Tensor:
    return ratio.clamp(*(config[name] for name in CLIPS))


def _cross_entropy(logprobs: Tensor, inputs: Inputs, _: Config) -> Tensor:
    return -(inputs["weights"] * logprobs).sum()


def _importance_sampling(logprobs: Tensor, inputs: Inputs, _: Config) -> Tensor:
    return -(_ratio(logprobs, inputs) * inputs["advantages"]).sum()


def _ppo(logprobs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    ratio, advantages = _ratio(logprobs, inputs), inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clipped(ratio, config) * advantages).sum()


def _cispo(logprobs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    weights = _clipped(_ratio(logprobs, inputs), config).detach()
    return -(weights * logprobs * inputs["advantages"]).sum()


def _dro(logprobs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    moved = (logprobs - inputs["logprobs"]).square()
    return -(logprobs * inputs["advantages"] - 0.5 * config["beta"] * moved).sum()


def _gspo(logprobs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    mask, advantages = inputs["sequence_ratio_mask"], inputs["advantages"]
    log_ratio = torch.where(mask != 0, logprobs - inputs["logprobs"], torch.zeros_like(logprobs))
    mean = (log_ratio * mask).sum() / mask.sum().clamp(min=1.0)
    # The ratio of the sequence in value, with the gradient of each token's own logprob.
    ratio = (mean.detach() + logprobs - logprobs.detach()).exp()
    return -torch.minimum(ratio * advantages, _clipped(ratio, config) * advantages).sum()


LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(("target_tokens", "weights"), {}, _cross_entropy),
    "importance_sampling": Loss(POLICY_INPUTS, {}, _importance_sampling),
    "ppo": Loss(POLICY_INPUTS, dict(zip(CLIPS, (0.8, 1.2), strict=True)), _ppo),
    "cispo": Loss(POLICY_INPUTS, dict(zip(CLIPS, (0.0, 4.0), strict=True)), _cispo),
    "dro": Loss(POLICY_INPUTS, {"beta": None}, _dro),
    "gspo": Loss((*POLICY_INPUTS, "sequence_ratio_mask"), dict.fromkeys(CLIPS), _gspo),
}
