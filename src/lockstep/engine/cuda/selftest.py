"""Start-up proof on this GPU that a sequence has the same bits in any chunks and any batch."""

from __future__ import annotations

import hashlib
import logging
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.errors import TritonError

from lockstep.engine.config import ModelConfig
from lockstep.engine.cuda.kernels import exact_kernels as kernels
from lockstep.engine.cuda.kernels.adapters import AdapterBank, Run
from lockstep.engine.cuda.kernels.sampling_kernels import token_logprobs
from lockstep.engine.cuda.prefill import Prefiller
from lockstep.engine.cuda.trainer import attend, mix
from lockstep.engine.model.arithmetic import route
from lockstep.engine.model.lora import HEAD_LAYER, Adapter, LoraDelta, adapter_rows
from lockstep.engine.model.model import Model, Segment
from lockstep.engine.weights.weights import Layer, Weights

if TYPE_CHECKING:
    from lockstep.engine.core import Core

log = logging.getLogger(__name__)
LENGTH = 150
SHORT = (3, 20, 50)
DECODE_TOKENS = 64
"""Tokens decoded by graphs. A kernel with a small error differs in about one token of ten."""
CUTS = ((7, 16, 40, 87), (64, 64, 14, *[1] * 8), (142, *[1] * 8))


def why_not_exact(core: Core) -> str | None:
    """Return how the bits depend on chunks, batch, decoding or the trainer's pass, or None."""
    model, weights, cache = core.model, core.served.weights, core.cache
    # Allow three sequences, even if a step of this engine takes fewer tokens.
    prefiller = Prefiller(model, cache, None, max(core.scheduler.max_batch_tokens, 3 * LENGTH))
    length, vocab = min(LENGTH, core.max_len - 1), core.config.vocab_size
    ids = [(i * 2654435761 + 12345) % vocab for i in range(length)]
    others = [ids[::-1][: length // 2], ids[3:]][: max(cache.slots - 1, 0)]
    with torch.inference_mode():
        whole = _score(prefiller, weights, [Segment.whole(0, 0, ids)], length)
        beside = [Segment.whole(at + 1, 0, other) for at, other in enumerate(others)]
        together = _score(prefiller, weights, [Segment.whole(0, 0, ids), *beside], length)
        if not torch.equal(whole, together):
            return f"logits differ by up to {_gap(whole, together)} beside other sequences"
        for cut in CUTS:
            rows = []
            for start, end in zip([0, *accumulate(cut)], accumulate(cut), strict=False):
                if piece := ids[start:end]:
                    segment = Segment.whole(0, start, piece)
                    rows.append(_score(prefiller, weights, [segment], len(piece)).clone())
            if not torch.equal(whole, torch.cat(rows)):
                return f"logits differ by up to {_gap(whole, torch.cat(rows))} in pieces of {cut}"
        for count in (length, *SHORT):  # small batches use other tiles
            trained = trainer_logits(model, weights, ids[:count])
            if not torch.equal(whole[:count], trained):
                gap = _gap(whole[:count], trained)
                return f"logits of {count} tokens differ by up to {gap} between engine and trainer"
    return _why_unlike_decoding(core, ids[:20])


def _score(prefiller: Prefiller, weights: Weights, segments: list[Segment], rows: int) -> Tensor:
    """Return the logits of the first `rows` rows."""
    return prefiller.logits(weights, prefiller.run(weights, segments)[0][:rows])


def _gap(a: Tensor, b: Tensor) -> str:
    return f"{float((a.float() - b.float()).abs().max()):.1e}"


def _why_unlike_decoding(core: Core, ids: list[int]) -> str | None:
    """Return how decoded tokens differ from the same tokens in a prompt, or None."""
    from lockstep.engine.cuda.start import complete
    from lockstep.tokens import Sampling

    count = max(min(DECODE_TOKENS, core.max_len - len(ids) - 1), 1)
    sampling = Sampling(max_tokens=count, ignore_eos=True, seed=1, logprob_mode="raw")
    completion = complete(core, ids, sampling)
    if completion is None:
        return "a request failed"
    scores = core.score([*ids, *completion.token_ids])[len(ids) - 1 :]
    if scores != completion.logprobs:
        worst = max(abs(a - b) for a, b in zip(scores, completion.logprobs, strict=True))
        return f"logprobs differ by up to {worst:.1e} between decoding and prefill"
    return None


def why_not_adapted(config: ModelConfig, bank: AdapterBank, like: Tensor) -> str | None:
    """Return how adapters in a graph differ from adapters applied one by one, or None."""
    device, kind, rank = str(like.device), like.dtype, min(bank.max_rank, 12)
    pairs = []
    for first in (1, 7):
        deltas = {}
        for (layer, module), (inner, *sizes) in _adapted_modules(config).items():
            starts = [0, *accumulate(sizes)]
            deltas[layer, module] = tuple(
                LoraDelta(
                    _numbers(device, kind, rank, inner + first)[:, first:].contiguous(),
                    _numbers(device, kind, size + first, rank)[first:].contiguous(),
                    start,
                )
                for start, size in zip(starts, sizes, strict=False)
            )
        pairs.append(Adapter("self-test", Path(), "", 1.3 / rank, deltas))
    first_adapter, second_adapter = pairs
    runs: list[Run] = [(first_adapter, 1), (None, 2), (second_adapter, 40), (first_adapter, 5)]
    rows = sum(count for _, count in runs)
    blocks = torch.from_numpy(bank.blocks(runs, rows)).to(device)
    with torch.inference_mode():
        # Both ways must agree in rows with one adapter, with another, and with none.
        for (layer, module), (inner, *sizes) in _adapted_modules(config).items():
            x, out = (_numbers(device, kind, rows, width) for width in (inner, sum(sizes)))
            expected = out.clone()
            for adapter_part in adapter_rows(runs, like.device):
                adapter_part.add_to(expected, x, layer, module, kernels.linear)
            bank.add_to(out, x, blocks, layer, module)
            if not torch.equal(out, expected):
                return f"{module} differs by up to {_gap(out, expected)}"
    bank.clear()
    return None


def _adapted_modules(config: ModelConfig) -> dict[tuple[int, str], tuple[int, ...]]:
    """Return the input and output sizes of adaptable modules, of one layer and the head."""
    sizes = {
        (HEAD_LAYER, "head"): (config.hidden, config.vocab_size),
        (0, "qkv"): (config.hidden, config.q_size, config.kv_size, config.kv_size),
        (0, "out"): (config.q_size, config.hidden),
    }
    if 0 not in config.moe_layers:
        sizes[0, "gate_up"] = (config.hidden, config.intermediate, config.intermediate)
        sizes[0, "down"] = (config.intermediate, config.hidden)
    return sizes


def trainer_logits(model: Model, weights: Weights, ids: list[int]) -> Tensor:
    """Return the logits of one sequence as a prepared transformers module computes them.

    Runs the same kernels without importing transformers.
    """
    c, kind = model.config, weights.embed.dtype
    sizes = (c.q_size, c.kv_size, c.kv_size)
    cos, sin = (turn[: len(ids)].to(kind) for turn in model.rotation)

    def heads(x: Tensor, norm: Tensor | None, *, turn: bool) -> Tensor:
        x = x.view(-1, c.head_dim)
        x = x if norm is None else kernels.head_norm(x.contiguous(), norm, c.eps)
        x = x.view(1, len(ids), -1, c.head_dim).transpose(1, 2)
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat((-high, low), -1) * sin if turn else x

    x = F.embedding(torch.tensor(ids, device=weights.embed.device), weights.embed)
    start = torch.zeros((1, 1), dtype=torch.long)
    for layer in weights.layers:
        h = kernels.add_norm(x, None, layer.attention_norm, c.eps)
        biases = (None,) * 3 if layer.qkv_bias is None else layer.qkv_bias.split(sizes)
        parts = zip(layer.qkv.split(sizes), biases, strict=True)
        q, k, v = (kernels.linear(h, weight, bias) for weight, bias in parts)
        q, k, v = (
            heads(q, layer.q_norm, turn=True),
            heads(k, layer.k_norm, turn=True),
            heads(v, None, turn=False),
        )
        attended = attend(q, k, v, start, model.scale).transpose(1, 2).reshape(len(ids), -1)
        x = x + kernels.linear(attended, layer.out)
        h = kernels.add_norm(x, None, layer.mlp_norm, c.eps)
        x = x + _trainer_mlp(model, layer, h)
    return kernels.linear(kernels.add_norm(x, None, weights.norm, c.eps), weights.head)


def _trainer_mlp(model: Model, layer: Layer, h: Tensor) -> Tensor:
    if layer.router is None:
        gate, up = (kernels.linear(h, weight) for weight in layer.gate_up.chunk(2))
        return kernels.linear(kernels.silu(gate) * up, layer.down)
    c, logits = model.config, kernels.linear(h, layer.router)
    weights, experts = route(logits, c.experts_per_token, c.normalize_top_k)
    return mix(h, experts, weights, layer.gate_up, layer.down)


@lru_cache
def fingerprint_on(device: str, dtype: str) -> str:
    """Return a digest of the bits of a fixed computation by the exact kernels on this device.

    Empty if the kernels do not run; the self-test then reports why.
    """
    try:
        return _fingerprint(device, getattr(torch, dtype))
    except (RuntimeError, TritonError) as error:
        log.info("no fingerprint of %s: %s", device, error)
        return ""


def _numbers(device: str, kind: torch.dtype, *shape: int) -> Tensor:
    """Return fixed values between -1 and 1, equal on every machine."""
    count = int(torch.tensor(shape).prod())
    mixed = (torch.arange(count, dtype=torch.int64) * 2654435761 + 12345) % 65521
    return ((mixed - 32760).float() / 32768).view(shape).to(device, kind)


def _fingerprint(device: str, kind: torch.dtype) -> str:
    numbers = partial(_numbers, device, kind)
    digest = hashlib.sha256(torch.cuda.get_device_name(device).encode())
    with torch.inference_mode():
        x = numbers(40, 1024)
        results = [kernels.linear(x, numbers(512, 1024)), kernels.gate(8 * x)]
        results.append(kernels.add_norm(x.clone(), None, numbers(1024), 1e-6))
        heads = numbers(1, 4, 100, 64)
        start = torch.zeros((1, 1), dtype=torch.long)
        results.append(attend(heads, heads[:, :2], heads[:, 2:], start, 0.125))
        results.append(token_logprobs(8 * numbers(8, 9000), torch.arange(8, device=device)))
        for result in results:
            digest.update(result.float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
