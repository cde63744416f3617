"""The divisor of the sum over a batch's token losses, and the tokens that it counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.train.losses.loss import Aggregation


@dataclass(frozen=True, slots=True)
class Denominator:
    """A way to average: the loss of a batch is sum(share * value) / sum(count) over its sequences.

    token: the mean over all tokens. sequence: the mean over sequences of the mean over their
    tokens. constant: the sum over the tokens, divided by the number of sequences times `length`.
    A sequence without a counted token does not count.
    """

    aggregation: Aggregation
    length: int

    def shares(self, counted_N: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return the factor of each token, given which tokens count."""
        if self.aggregation != "sequence":
            return torch.ones(counted_N.shape, dtype=torch.float64, device=counted_N.device)
        sums = [
            own.sum().clamp(min=1).double().expand(len(own)) for own in counted_N.split(lengths)
        ]
        return 1 / torch.cat(sums)

    def count(self, tokens: Sequence[int]) -> float:
        """Return what the sum is divided by, given the number of counted tokens per sequence."""
        if self.aggregation == "token":
            return sum(tokens)
        sequences = sum(own > 0 for own in tokens)
        return sequences * (self.length if self.aggregation == "constant" else 1)
