"""The interface of a loss: the inputs and options that it takes, and the value of each token.

A loss is a function of tensors. Its positional parameters name the inputs that it needs, and its
keyword-only parameters are its options with their defaults:

    def ppo(logprobs, old_logprobs, advantages, token_mask, *, clip_low_threshold=0.8, ...):
        return TokenLoss(...)
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from lockstep.tokens.errors import BadRequest

Option = float | str
LearnsFrom = Literal["rewards", "teacher", "distributions"]
"""Rewards, the teacher's logprobs of sampled tokens, or its distributions at these tokens."""
Baseline = Literal["group", "group_std", "leave_one_out", "batch"]
"""The rewards that a reward is compared with (see `advantages`)."""
Aggregation = Literal["token", "sequence", "constant"]
"""The way to average over the tokens of a batch (see `Denominator`)."""
INPUTS = {
    "logprobs": "the trainer's logprobs, which carry the gradient",
    "old_logprobs": "the sampler's logprobs",
    "advantages": "how much better than expected each token was",
    "token_mask": "true for tokens that count; a loss that takes it returns 0 for the others",
    "weights": "how much each token counts in a supervised loss",
    "sequence_ratio_mask": "weights of the tokens in the ratio of their sequence",
    "lengths": "the number of tokens of each sequence, for losses that compare whole sequences",
    "student_distribution": "the trainer's logprobs of alternatives to each token (tokens, K)",
    "teacher_distribution": "the teacher's logprobs of the same alternatives (tokens, K)",
}
"""The inputs that a loss may take. Other tensors than distributions have one shape: all tokens of
the sequences."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The loss of every token, in the shape of `logprobs`, before it is summed or averaged.

    `metrics` are values per token that a step averages over the tokens that count.
    """

    values: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Loss:
    """One entry of the table.

    All but the first three fields are used by `lockstep train` alone. `learns_from` says where
    advantages come from. `baseline` and `aggregation` are the algorithm's own, which a run may
    change. `trains_decoupled` is False for losses that bound the distance between sampler and
    trainer themselves: no correction can weight their tokens. `resamples` replaces groups whose
    rewards are all equal, and `overlong` is the share of `rollout.max_tokens` in which long
    rollouts lose reward.
    """

    compute: Callable[..., TokenLoss]
    inputs: tuple[str, ...]
    options: Mapping[str, Option | None]
    """The default of each option; None where the caller must give a value."""
    learns_from: LearnsFrom = "rewards"
    baseline: Baseline = "group"
    aggregation: Aggregation = "token"
    trains_decoupled: bool = True
    resamples: bool = False
    overlong: float = 0.0
    shares: tuple[str, ...] = ()
    """Options that must lie between 0 and 1, excluding both."""

    @classmethod
    def of(cls, compute: Callable[..., TokenLoss], **algorithm: Any) -> Loss:
        """Return the loss that a function defines by its signature.

        `algorithm` holds the other fields of the entry.

        Raises TypeError for a parameter that is neither one of `INPUTS` nor keyword-only.
        """
        inputs: list[str] = []
        options: dict[str, Option | None] = {}
        for parameter in inspect.signature(compute).parameters.values():
            if parameter.kind is parameter.KEYWORD_ONLY:
                default = parameter.default
                options[parameter.name] = None if default is parameter.empty else default
            elif parameter.name in INPUTS:
                inputs.append(parameter.name)
            else:
                raise TypeError(
                    f"{compute.__name__} takes {parameter.name!r}: the inputs of losses are "
                    f"{', '.join(INPUTS)}; an option is keyword-only"
                )
        return cls(compute, tuple(inputs), options, **algorithm)

    def __call__(self, inputs: Mapping[str, Any], options: Mapping[str, Option]) -> TokenLoss:
        """Return the loss of every token. `options` come from `with_defaults`."""
        return self.compute(**{name: inputs[name] for name in self.inputs}, **options)

    def with_defaults(
        self, name: str, options: Mapping[str, Option], *, field: str
    ) -> dict[str, Option]:
        """Return all options of the loss `name`, with the defaults of those that are not given.

        Raises BadRequest for an unknown or missing option, one of the wrong type, a negative or
        infinite number, and for a lower limit above the upper one. `field` is where the caller's
        options come from.
        """
        for key, value in options.items():
            if key not in self.options:
                raise BadRequest(
                    f"{field}.{key} is {value!r}: the options of {name} are "
                    f"{', '.join(self.options) or 'none'}",
                    param=f"{field}.{key}",
                )
            kind = str if isinstance(self.options[key], str) else (int, float)
            if not isinstance(value, kind) or isinstance(value, bool):
                expected = "a text" if kind is str else "a number"
                raise BadRequest(
                    f"{field}.{key} is {value!r}: expected {expected}", param=f"{field}.{key}"
                )
            if not isinstance(value, str) and not 0 <= value < math.inf:
                raise BadRequest(
                    f"{field}.{key} is {value!r}: expected 0 or more, and finite",
                    param=f"{field}.{key}",
                )
            if key in self.shares and not 0 < float(value) < 1:
                raise BadRequest(
                    f"{field}.{key} is {value!r}: expected a number above 0 and below 1",
                    param=f"{field}.{key}",
                )
        merged: dict[str, Option] = {}
        values: dict[str, Option | None] = {**self.options, **options}
        for key, choice in values.items():
            if choice is None:
                raise BadRequest(
                    f"{field}.{key} is missing: {name} has no default for it",
                    param=f"{field}.{key}",
                )
            merged[key] = choice if isinstance(choice, str) else float(choice)
        low, high = (merged.get(f"clip_{side}_threshold", 1.0) for side in ("low", "high"))
        if isinstance(low, float) and isinstance(high, float) and low > high:
            raise BadRequest(
                f"{field}.clip_low_threshold is {low:g}, but {field}.clip_high_threshold is "
                f"{high:g}: expected a lower limit of at most the upper one",
                param=f"{field}.clip_low_threshold",
            )
        return merged
