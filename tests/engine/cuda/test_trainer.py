"""Gradients of the trainer's functions on exact kernels, compared with plain torch.

Run by Triton's interpreter in fp32, where both must agree closely.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.cuda import trainer
from lockstep.engine.cuda.kernels import exact_attention, prefill_kernels
from lockstep.tokens.errors import NotExact

pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_attention, "KEYS", 16)
    monkeypatch.setattr(exact_attention, "SPLIT", 16)
    monkeypatch.setattr(exact_attention, "QUERIES", 16)
    monkeypatch.setattr(prefill_kernels, "ROWS", 16)
    torch.manual_seed(0)


def same_gradients(
    ours: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: Tensor
) -> None:
    results = []
    for function in (ours, plain):
        leaves = [each.clone().requires_grad_() for each in inputs]
        out = function(*leaves)
        slope = torch.linspace(-1, 1, out.numel()).view(out.shape)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, slope)))
    for mine, its in zip(*results, strict=True):
        torch.testing.assert_close(mine, its, rtol=2e-4, atol=2e-4)


def test_a_product() -> None:
    module = SimpleNamespace(weight=None, bias=None)

    def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        module.weight, module.bias = weight, bias
        return trainer._linear(module, x)

    same_gradients(ours, F.linear, torch.randn(2, 3, 20), torch.randn(7, 20), torch.randn(7))


@pytest.mark.parametrize("shape", [(2, 3, 32), (1, 2, 3, 32)], ids=["tokens", "heads"])
def test_a_norm(shape: tuple[int, ...]) -> None:
    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return trainer._norm(SimpleNamespace(weight=weight, variance_epsilon=1e-6), x)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight

    same_gradients(ours, plain, torch.randn(shape), torch.rand(32))


def test_a_gate() -> None:
    same_gradients(trainer._Silu.apply, F.silu, torch.randn(3, 50))


def test_logprobs_of_tokens() -> None:
    tokens = torch.tensor([3, 0, 599])

    def plain(logits: Tensor) -> Tensor:
        return torch.log_softmax(logits / 0.7, -1).gather(-1, tokens[:, None]).squeeze(-1)

    same_gradients(
        lambda logits: trainer.logprobs_of(logits, tokens, 0.7), plain, torch.randn(3, 600)
    )


@pytest.mark.parametrize("start", [0, 5])
def test_attention(start: int) -> None:
    queries, keys = 20, 20 + start
    q, k, v = torch.randn(2, 4, queries, 32), *torch.randn(2, 2, 2, keys, 32)
    positions = torch.arange(start, keys)[None]
    seen = torch.arange(keys) <= positions[0][:, None]

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.2, enable_gqa=True)

    same_gradients(lambda q, k, v: trainer.attend(q, k, v, positions, 0.2), plain, q, k, v)


def test_an_unsupported_model_is_rejected() -> None:
    with pytest.raises(NotExact, match="is not supported"):
        trainer.prepare_modules(torch.nn.Linear(2, 2))
