"""The interface of a loss: the inputs and options that it takes, and the value of each token.

A loss is a function of tensors. Its positional parameters name the inputs that it needs, and its
keyword-only parameters are its options with their defaults:

    def ppo(logprobs, old_logprobs, advantages, token_mask, *, clip_low_threshold=0.8, ...):
        return TokenLoss(...)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from lockstep.tokens.errors import BadRequest

Option = float | str
LearnsFrom = Literal["rewards", "teacher"]
INPUTS = {
    "logprobs": "the trainer's logprobs, which carry the gradient",
    "old_logprobs": "the sampler's logprobs",
    "advantages": "how much better than expected each token was",
    "token_mask": "true for tokens that count; a loss that takes it returns 0 for the others",
    "weights": "how much each token counts in a supervised loss",
    "sequence_ratio_mask": "weights of the tokens in the ratio of their sequence",
    "lengths": "the number of tokens of each sequence, for losses that compare whole sequences",
}
"""The inputs that a loss may take. All tensors have one shape: all tokens of the sequences."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The loss of every token, in the shape of `logprobs`, before it is summed or averaged.

    `metrics` are values per token that a step averages over the tokens that count.
    """

    values: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Loss:
    """One entry of the table. `learns_from` says where `lockstep train` takes advantages from."""

    compute: Callable[..., TokenLoss]
    inputs: tuple[str, ...]
    options: Mapping[str, Option | None]
    """The default of each option; None where the caller must give a value."""
    learns_from: LearnsFrom

    @classmethod
    def of(cls, compute: Callable[..., TokenLoss], *, learns_from: LearnsFrom = "rewards") -> Loss:
        """Return the loss that a function defines by its signature.

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
        return cls(compute, tuple(inputs), options, learns_from)

    def __call__(self, inputs: Mapping[str, Any], options: Mapping[str, Option]) -> TokenLoss:
        """Return the loss of every token. `options` come from `with_defaults`."""
        return self.compute(**{name: inputs[name] for name in self.inputs}, **options)

    def with_defaults(
        self, name: str, options: Mapping[str, Option], *, field: str
    ) -> dict[str, Option]:
        """Return all options of the loss `name`, with the defaults of those that are not given.

        Raises BadRequest for an unknown or missing option, or one of the wrong type; `field` is
        where the caller's options come from.
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
        merged: dict[str, Option] = {}
        values: dict[str, Option | None] = {**self.options, **options}
        for key, choice in values.items():
            if choice is None:
                raise BadRequest(
                    f"{field}.{key} is missing: {name} has no default for it",
                    param=f"{field}.{key}",
                )
            merged[key] = choice if isinstance(choice, str) else float(choice)
        return merged
