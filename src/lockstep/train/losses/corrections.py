"""Corrections for tokens whose sampler differs from the trainer: weights, and masks that reject.

rho = exp(trainer - sampler) is the ratio of the logprobs that the trainer computed before the
update and those of the sampler. A correction looks at rho of each token, at the product of a
sequence's rhos, or at their geometric mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

CorrectionKind = Literal["tis", "mis", "icepop", "mask"]
Level = Literal["token", "sequence", "geometric"]
DEFAULT_RANGES: dict[tuple[str, str], tuple[float, float]] = {
    ("tis", "token"): (0.0, 2.0),
    ("tis", "sequence"): (0.0, 2.0),
    ("mis", "token"): (0.0, 3.0),
    ("mis", "sequence"): (0.0, 3.0),
    ("icepop", "token"): (0.5, 5.0),
    ("mask", "token"): (0.5, 2.0),
    ("mask", "sequence"): (0.5, 2.0),
    ("mask", "geometric"): (0.999, 1.001),
}
"""The combinations of kind and level, with the range of rho if none is given."""


@dataclass(frozen=True, slots=True)
class Correction:
    """One correction with a range of rho.

    tis multiplies the loss by rho, limited to the range. mis and icepop multiply it by rho inside
    the range and reject tokens outside. mask rejects tokens outside and changes nothing inside.
    """

    kind: CorrectionKind
    level: Level
    low: float
    high: float

    @property
    def name(self) -> str:
        return f"{self.level}_{self.kind}"

    @property
    def weights(self) -> bool:
        """Whether the loss is multiplied by rho."""
        return self.kind != "mask"


@dataclass(frozen=True, slots=True)
class Corrected:
    """Factors of the loss of each token, the tokens that are not rejected, and, by correction, the
    tokens that it limited or rejected."""

    weight_N: Tensor
    keep_N: Tensor
    touched_N: dict[str, Tensor] = field(default_factory=dict)


def correct(
    log_rho_N: Tensor, learn_N: Tensor, lengths: Sequence[int], corrections: Sequence[Correction]
) -> Corrected:
    """Return what the corrections do to tokens of sequences of these lengths.

    Only tokens with `learn_N` count, also in products and means.
    """
    log_rho_N = torch.where(learn_N, log_rho_N.detach(), torch.zeros_like(log_rho_N))
    weight_N, keep_N = torch.ones_like(log_rho_N), learn_N.clone()
    touched: dict[str, Tensor] = {}
    for own in corrections:
        rho_N = _per_level(log_rho_N, learn_N, lengths, own.level).exp()
        outside_N = learn_N & ((rho_N < own.low) | (rho_N > own.high))
        touched[own.name] = outside_N
        if own.weights:
            weight_N = weight_N * rho_N.clamp(own.low, own.high)
        if own.kind != "tis":
            keep_N &= ~outside_N
    return Corrected(weight_N, keep_N, touched)


def _per_level(log_rho_N: Tensor, learn_N: Tensor, lengths: Sequence[int], level: Level) -> Tensor:
    """Return log rho of each token, or of its sequence: the sum, or the mean of its tokens."""
    if level == "token":
        return log_rho_N
    rows = []
    for own, counts in zip(log_rho_N.split(lengths), learn_N.split(lengths), strict=True):
        value = own.sum()
        if level == "geometric":
            value = value / counts.sum().clamp(min=1)
        rows.append(value.expand(len(own)))
    return torch.cat(rows)
