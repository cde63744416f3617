"""Samples tokens from logits: one uniform number per row, so a seed gives the same in any batch."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, nan
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.engine.processing import HIDDEN, LogitsRow, TokenCounts, process, restricts
from lockstep.tokens import LogprobMode, Ranked, Sampling

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

    @property
    def processing(self) -> LogitsRow:
        """What is done to the logits before a token is drawn."""
        temperature = self.sampling.temperature
        return LogitsRow(self.sampling, temperature, self.banned, self.counts, self.allowed)


class Sampled(NamedTuple):
    """A token with its logprob, its rank among all (1 is the most likely) and the likeliest."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[Ranked, ...]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but the seed and the position (splitmix64)."""
    z = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((z ^ (z >> 31)) >> 40) / (1 << 24)


def drawn_whole(row: SamplingRow) -> bool:
    """Whether every token can be drawn with its own probability, at most tempered.

    Kernels that know nothing else draw such rows; all others are drawn by `sample`.
    """
    return not row.banned and not restricts(row.sampling)


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[Sampled]:
    """One token per row of `logits` (rows, vocab), each from its own row alone.

    A row that is no distribution, as its logits or its options are out of range, gets logprob NaN.
    """
    plain = all(drawn_whole(row) and row.sampling.temperature in UNTEMPERED for row in rows)
    shaped = logits if plain else process(logits, [row.processing for row in rows])
    tokens, totals = _draw(shaped, [row.uniform for row in rows])
    greedy = [at for at, row in enumerate(rows) if row.sampling.temperature == 0]
    if greedy:
        tokens[greedy] = shaped[greedy].argmax(dim=-1)
    raw = [at for at, row in enumerate(rows) if row.mode == "raw"]
    logprobs = torch.log_softmax(logits if len(raw) == len(rows) else shaped, dim=-1)
    if shaped is not logits and 0 < len(raw) < len(rows):
        logprobs[raw] = torch.log_softmax(logits[raw], dim=-1)
    chosen, ranks = score(logprobs, tokens)
    tops = top_logprobs(logprobs, [row.sampling.logprobs for row in rows])
    columns = tokens.tolist(), chosen.tolist(), ranks.tolist(), tops, totals.tolist()
    return [
        Sampled(token, logprob if isfinite(total) else nan, rank, top)
        for token, logprob, rank, top, total in zip(*columns, strict=True)
    ]


def score(logprobs: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The logprob of each row's token and its rank among all (1 is the most likely)."""
    chosen = logprobs.gather(-1, tokens[:, None])
    return chosen.squeeze(-1), (logprobs > chosen).sum(dim=-1) + 1


def top_logprobs(logprobs: Tensor, wanted: Sequence[int]) -> list[tuple[Ranked, ...]]:
    """The `wanted[i]` most likely tokens of row i that are possible at all, likeliest first."""
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


def _draw(shaped: Tensor, uniforms: list[float]) -> tuple[Tensor, Tensor]:
    """Inverse-CDF sampling; a token of probability zero is never drawn. Tokens, and the sums of
    probabilities, which are finite only of rows that are distributions at all."""
    cumulative = torch.softmax(shaped, dim=-1).cumsum(dim=-1)
    total = cumulative[:, -1:].contiguous()
    at = torch.tensor(uniforms, device=shaped.device)[:, None] * total
    drawn = torch.searchsorted(cumulative, at, right=True)
    # Rounding may push `at` onto the total: the last token with any mass is then the right one.
    drawn = torch.minimum(drawn, torch.searchsorted(cumulative, total)).squeeze(-1)
    # A row of NaN finds no place at all; it must not break the rows beside it.
    return drawn.clamp_(max=shaped.shape[-1] - 1), total.squeeze(-1)
