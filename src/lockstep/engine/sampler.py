"""Samples tokens from logits: one uniform number per row, so a seed gives the same in any batch."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, nan
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.tokens import LogprobMode, Ranked, Sampling

HIDDEN = float("-inf")
_MASK = (1 << 64) - 1


class SamplingRow(NamedTuple):
    """How to sample one row of logits."""

    sampling: Sampling
    mode: LogprobMode
    uniform: float
    banned: tuple[int, ...] = ()
    """Tokens that must not come yet (ends, before min_tokens)."""


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


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[Sampled]:
    """One token per row of `logits` (rows, vocab), each from its own row alone.

    A row that is no distribution, as its logits or its options are out of range, gets logprob NaN.
    """
    shaped = _shape(logits, rows)
    tokens, totals = _draw(shaped, [row.uniform for row in rows])
    greedy = [at for at, row in enumerate(rows) if row.sampling.temperature == 0]
    if greedy:
        tokens[greedy] = shaped[greedy].argmax(dim=-1)
    logprobs = torch.log_softmax(logits, dim=-1)
    processed = [at for at, row in enumerate(rows) if row.mode == "processed"]
    if processed and shaped is not logits:
        logprobs[processed] = torch.log_softmax(shaped[processed], dim=-1)
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


def _shape(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """The logits that are sampled from: biased, masked, tempered and truncated, row by row.

    The logits themselves where no row changes them.
    """
    if not any(row.banned or _shapes(row.sampling) for row in rows):
        return logits
    temperatures = [row.sampling.temperature or 1.0 for row in rows]
    shaped = logits / torch.tensor(temperatures, device=logits.device)[:, None]
    for at, row in enumerate(rows):
        options = row.sampling
        if options.logit_bias:
            ids = list(options.logit_bias)
            bias = torch.tensor(list(options.logit_bias.values()), device=logits.device)
            shaped[at, ids] = (logits[at, ids] + bias) / temperatures[at]
        if options.allowed_token_ids is not None:
            kept = torch.full_like(shaped[at], HIDDEN)
            ids = list(options.allowed_token_ids)
            kept[ids] = shaped[at, ids]
            shaped[at] = kept
        if row.banned:
            shaped[at, list(row.banned)] = HIDDEN
        if options.top_k or options.top_p < 1 or options.min_p:
            shaped[at] = _truncate(shaped[at], options)
    return shaped


def _shapes(options: Sampling) -> bool:
    return options.temperature not in (0.0, 1.0) or restricts(options)


def restricts(options: Sampling) -> bool:
    """Whether an option other than the temperature changes the distribution that is sampled."""
    return bool(
        options.logit_bias
        or options.allowed_token_ids is not None
        or options.top_k
        or options.top_p < 1
        or options.min_p
    )


def _truncate(logits: Tensor, options: Sampling) -> Tensor:
    """One row with all but the tokens that top_k, top_p and min_p leave hidden."""
    ordered, ids = logits.sort(descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if options.top_k:
        keep[options.top_k :] = False
    probs = torch.softmax(ordered.masked_fill(~keep, HIDDEN), dim=-1)
    if options.top_p < 1:
        before = probs.cumsum(dim=-1) - probs
        keep &= before < options.top_p
    if options.min_p:
        keep &= probs >= options.min_p * probs[0]
    return torch.full_like(logits, HIDDEN).scatter(0, ids[keep], ordered[keep])


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
