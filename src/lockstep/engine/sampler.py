"""Sampling of tokens from logits.

Each row consumes one uniform number that depends on its seed and position only, so a seed gives the
same tokens in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, nan
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.engine.processing import (
    HIDDEN,
    LogitsRow,
    TokenCounts,
    TokenLists,
    process,
    restricts,
)
from lockstep.tokens import LogprobMode, Ranked, Sampling
from lockstep.tokens.support import SupportRow, support_row

_MASK = (1 << 64) - 1
UNTEMPERED = (1.0, 0.0)


class SamplingRow(NamedTuple):
    """How to sample one row of logits."""

    sampling: Sampling
    mode: LogprobMode
    uniform: float
    banned: tuple[int, ...] = ()
    counts: TokenCounts | None = None
    allowed: Tensor | None = None
    lists: TokenLists | None = None
    support: bool = False
    """Whether to record the set of tokens that the token is drawn from."""

    @property
    def processing(self) -> LogitsRow:
        """How to process the logits before a token is drawn."""
        temperature = self.sampling.temperature
        return LogitsRow(
            self.sampling, temperature, self.banned, self.counts, self.allowed, self.lists
        )


class Sampled(NamedTuple):
    """A sampled token with its logprob, its rank (1 is the most likely) and the top tokens.

    `support` is the set it was drawn from, or None if that was not recorded.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[Ranked, ...]
    support: SupportRow | None = None


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) that depends only on the seed and the position (splitmix64)."""
    z = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    # 24 bits: exact in fp32, so that every device draws with the same number.
    return ((z ^ (z >> 31)) >> 40) / (1 << 24)


def is_unrestricted(row: SamplingRow) -> bool:
    """Return whether the row samples the full distribution, changed by a temperature at most.

    GPU kernels sample such rows; `sample` handles all others.
    """
    return not row.banned and not restricts(row.sampling)


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[Sampled]:
    """Sample one token per row of `logits` (rows, vocab), independently of the other rows.

    A row that is not a distribution, because its logits or its options are out of range, gets
    logprob NaN.
    """
    plain = all(is_unrestricted(row) and row.sampling.temperature in UNTEMPERED for row in rows)
    shaped = logits if plain else process(logits, [row.processing for row in rows])
    tokens, totals = _draw(shaped, [row.uniform for row in rows])
    greedy = [at for at, row in enumerate(rows) if row.sampling.temperature == 0]
    if greedy:
        tokens[greedy] = shaped[greedy].argmax(dim=-1)
    # One log_softmax over all rows in the usual case of a single logprob mode.
    raw = [at for at, row in enumerate(rows) if row.mode == "raw"]
    logprobs = torch.log_softmax(logits if len(raw) == len(rows) else shaped, dim=-1)
    if shaped is not logits and 0 < len(raw) < len(rows):
        logprobs[raw] = torch.log_softmax(logits[raw], dim=-1)
    token_logprobs, ranks = score(logprobs, tokens)
    tops = top_logprobs(logprobs, [row.sampling.logprobs for row in rows])
    supports = _supports(shaped, rows)
    columns = tokens.tolist(), token_logprobs.tolist(), ranks.tolist(), tops, totals.tolist()
    return [
        Sampled(token, logprob if isfinite(total) else nan, rank, top, support)
        for token, logprob, rank, top, total, support in zip(*columns, supports, strict=True)
    ]


def score(logprobs: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logprob of each row's token and its rank (1 is the most likely)."""
    token_logprobs = logprobs.gather(-1, tokens[:, None])
    return token_logprobs.squeeze(-1), (logprobs > token_logprobs).sum(dim=-1) + 1


def top_logprobs(logprobs: Tensor, wanted: Sequence[int]) -> list[tuple[Ranked, ...]]:
    """Return the `wanted[i]` most likely tokens of row i, most likely first.

    Tokens of probability zero are left out.
    """
    most = min(max(wanted, default=0), logprobs.shape[-1])
    if not most:
        return [()] * len(wanted)
    values, ids = (t.tolist() for t in logprobs.topk(most, dim=-1))
    return [
        tuple(
            Ranked(ids[row][k], values[row][k], k + 1)
            for k in range(min(count, most))
            if values[row][k] > HIDDEN
        )
        for row, count in enumerate(wanted)
    ]


def _supports(shaped: Tensor, rows: Sequence[SamplingRow]) -> list[SupportRow | None]:
    """Return the set of tokens that each row can draw, for the rows that record it."""
    supports: list[SupportRow | None] = [None] * len(rows)
    at = [at for at, row in enumerate(rows) if row.support]
    if at:
        # One copy from the device for all rows.
        masks = (shaped[at] > HIDDEN).cpu().numpy()
        for row, mask in zip(at, masks, strict=True):
            supports[row] = support_row(mask)
    return supports


def _draw(shaped: Tensor, uniforms: list[float]) -> tuple[Tensor, Tensor]:
    """Sample by inverse CDF; return the tokens and the sum of each row's probabilities.

    A token of probability zero is never drawn. The sum is finite only for a row that is a
    distribution.
    """
    cumulative = torch.softmax(shaped, dim=-1).cumsum(dim=-1)
    total = cumulative[:, -1:].contiguous()
    at = torch.tensor(uniforms, device=shaped.device)[:, None] * total
    tokens = torch.searchsorted(cumulative, at, right=True)
    # Rounding may push `at` onto the total. The last token with any mass is then the right one.
    tokens = torch.minimum(tokens, torch.searchsorted(cumulative, total)).squeeze(-1)
    # A row of NaN yields an index past the vocabulary, which must not break the other rows.
    return tokens.clamp_(max=shaped.shape[-1] - 1), total.squeeze(-1)
