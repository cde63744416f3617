"""Triton kernels that sample tokens from logits in three passes, without copying the logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2 as pow2

CHUNK = 4096
"""Logits per program."""


def draw(
    logits: Tensor,
    uniforms: Tensor,
    temperatures: Tensor,
    processed: Tensor,
    tokens: Tensor,
    logprobs: Tensor,
    ranks: Tensor,
    highest: Tensor,
    logs: Tensor,
) -> None:
    """Write a token (int32), its logprob (fp32) and its rank (int32) for each row of logits.

    Samples by inverse CDF, as `sampler.sample` does: one uniform number per row selects the first
    token whose cumulative share exceeds it. Temperature 0 selects the most likely. Logprobs are
    those of the logits as they are, or divided by the temperature where `processed` is not 0; NaN
    for a row that is not a distribution. The logprob of any other token is (its logit - highest) /
    temperature - logs.
    """
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    wide = pow2(chunks)
    stats = torch.empty((4, rows, wide), dtype=torch.float32, device=logits.device)
    chosen = torch.empty(rows, dtype=torch.float32, device=logits.device)
    sizes = {"wide": wide, "chunk": CHUNK}
    _weigh[(wide, rows)](logits, temperatures, stats, vocab, rows, **sizes, num_warps=8)
    _normalize[(rows,)](temperatures, processed, stats, highest, logs, rows, wide=wide, num_warps=1)
    _pick[(rows,)](
        logits, uniforms, temperatures, processed, stats, tokens, logprobs, chosen, ranks,
        highest, logs, vocab, rows, **sizes, num_warps=8,
    )  # fmt: skip
    _rank[(chunks, rows)](logits, chosen, ranks, vocab, chunk=CHUNK, num_warps=8)


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the logprob of one token of each row, fp32, with the bits that `draw` gives it.

    Logits must be contiguous and of the dtype that `draw` gets. Temperature 0 is treated as 1.
    """
    rows, vocab = logits.shape
    wide = pow2(triton.cdiv(vocab, CHUNK))
    stats = torch.empty((4, rows, wide), dtype=torch.float32, device=logits.device)
    heats = torch.full((rows,), temperature, dtype=torch.float32, device=logits.device)
    processed = torch.ones(rows, dtype=torch.int32, device=logits.device)
    highest, logs, out = torch.empty((3, rows), dtype=torch.float32, device=logits.device).unbind()
    _weigh[(wide, rows)](logits, heats, stats, vocab, rows, wide=wide, chunk=CHUNK, num_warps=8)
    _normalize[(rows,)](heats, processed, stats, highest, logs, rows, wide=wide, num_warps=1)
    _score[(rows,)](logits, tokens.to(torch.int32), heats, highest, logs, out, vocab, num_warps=1)
    return out


@triton.jit(do_not_specialize=["rows"])
def _weigh(logits, temperatures, stats, vocab, rows, wide: tl.constexpr, chunk: tl.constexpr):
    """Store each chunk's highest logit, its index, and the sums of exp, plain and tempered."""
    part, row = tl.program_id(0), tl.program_id(1)
    at = part * chunk + tl.arange(0, chunk)
    inside = at < vocab
    value = tl.load(logits + row.to(tl.int64) * vocab + at, mask=inside, other=float("-inf"))
    value = value.to(tl.float32)
    high = tl.max(value, axis=0)
    place = row * wide + part
    tl.store(stats + place, high)
    if high > float("-inf"):
        value -= high
        heat = tl.load(temperatures + row)
        first = tl.min(tl.where(value == 0, at, vocab), axis=0)
        tl.store(stats + rows * wide + place, first.to(tl.float32))
        plain = tl.sum(tl.exp(value), axis=0)
        tl.store(stats + 2 * rows * wide + place, plain)
        total = plain
        if (heat > 0) & (heat != 1.0):
            total = tl.sum(tl.exp(value / heat), axis=0)
        tl.store(stats + 3 * rows * wide + place, total)
    else:
        tl.store(stats + rows * wide + place, 0.0)
        # NaN compares as not greater. Keep it in the sum, so that the row is reported as NaN.
        broken = tl.sum(tl.where(inside, tl.where(value == value, 0.0, value), 0.0), axis=0)
        tl.store(stats + 2 * rows * wide + place, broken)
        tl.store(stats + 3 * rows * wide + place, broken)


@triton.jit(do_not_specialize=["rows"])
def _normalize(temperatures, processed, stats, highest, logs, rows, wide: tl.constexpr):
    """Store the highest logit of a row and the logarithm of the sum of its shares.

    Both are NaN for a row that is not a distribution. This is a separate kernel, so that every
    logprob is computed with the same bits.
    """
    row = tl.program_id(0)
    part = row * wide + tl.arange(0, wide)
    high = tl.load(stats + part)
    top = tl.max(high, axis=0)
    heat = tl.load(temperatures + row)
    plain = tl.load(stats + 2 * rows * wide + part) * tl.exp(high - top)
    shares = tl.load(stats + 3 * rows * wide + part)
    shares *= tl.exp((high - top) / tl.where(heat > 0, heat, 1.0))
    total, raw = tl.sum(shares, axis=0), tl.sum(plain, axis=0)
    sound = (total > 0) & (total < float("inf")) & (raw < float("inf"))
    log = tl.log(tl.where(tl.load(processed + row) != 0, total, raw))
    tl.store(highest + row, top)
    tl.store(logs + row, tl.where(sound, log, float("nan")))


@triton.jit
def _logprob(logit, top, log, heat):
    return (logit - top) / heat - log


@triton.jit
def _score(logits, tokens, temperatures, highest, logs, out, vocab):
    row = tl.program_id(0)
    heat = tl.load(temperatures + row)
    logit = tl.load(logits + row.to(tl.int64) * vocab + tl.load(tokens + row)).to(tl.float32)
    heat = tl.where(heat > 0, heat, 1.0)
    tl.store(out + row, _logprob(logit, tl.load(highest + row), tl.load(logs + row), heat))


@triton.jit(do_not_specialize=["rows"])
def _pick(
    logits, uniforms, temperatures, processed, stats, tokens, logprobs, chosen, ranks,
    highest, logs, vocab, rows, wide: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """Select the token of one row: first its chunk, by the chunks' shares, then its place there."""
    row = tl.program_id(0)
    part = tl.arange(0, wide)
    high = tl.load(stats + row * wide + part)
    heat = tl.load(temperatures + row)
    heat_or_one = tl.where(heat > 0, heat, 1.0)
    top = tl.max(high, axis=0)
    shares = tl.load(stats + 3 * rows * wide + row * wide + part)
    shares *= tl.exp((high - top) / heat_or_one)
    ends = tl.cumsum(shares, axis=0)
    total = tl.sum(shares, axis=0)
    # Rounding may lead past the end. The last chunk with any share is then the right one.
    last = tl.max(tl.where(shares > 0, part, 0), axis=0)
    target = tl.load(uniforms + row) * total
    which = tl.minimum(tl.min(tl.where(ends > target, part, wide), axis=0), last)
    before = tl.sum(tl.where(part < which, shares, 0.0), axis=0)
    line = logits + row.to(tl.int64) * vocab
    at = tl.arange(0, chunk)
    inside = which * chunk + at < vocab
    value = tl.load(line + which * chunk + at, mask=inside, other=float("-inf")).to(tl.float32)
    mass = tl.exp((value - top) / heat_or_one)
    beyond = before + tl.cumsum(mass, axis=0)
    final = tl.max(tl.where(mass > 0, at, 0), axis=0)
    place = tl.minimum(tl.min(tl.where(beyond > target, at, chunk), axis=0), final)
    first = tl.load(stats + rows * wide + row * wide + part)
    likeliest = tl.min(tl.where(high == top, first, float("inf")), axis=0).to(tl.int32)
    token = tl.where(heat > 0, which * chunk + place, likeliest)
    token = tl.minimum(tl.maximum(token, 0), vocab - 1).to(tl.int32)
    logit = tl.load(line + token).to(tl.float32)
    scale = tl.where(tl.load(processed + row) != 0, heat_or_one, 1.0)
    tl.store(tokens + row, token)
    tl.store(logprobs + row, _logprob(logit, top, tl.load(logs + row), scale))
    tl.store(chosen + row, logit)
    tl.store(ranks + row, 1)


@triton.jit
def _rank(logits, chosen, ranks, vocab, chunk: tl.constexpr):
    """Add the number of logits of a chunk that are above the sampled one."""
    row = tl.program_id(1)
    at = tl.program_id(0) * chunk + tl.arange(0, chunk)
    line = logits + row.to(tl.int64) * vocab
    value = tl.load(line + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    above = tl.sum((value > tl.load(chosen + row)).to(tl.int32), axis=0)
    tl.atomic_add(ranks + row, above)
