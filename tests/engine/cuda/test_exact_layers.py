"""Comparison of adapters and experts on the exact kernels with the engine on a CPU.

The kernels run in Triton's interpreter in fp32, so both agree up to rounding.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lockstep.engine.cuda import prefill, trainer
from lockstep.engine.cuda.graphs import Decoder, GraphPool
from lockstep.engine.cuda.kernels import exact_attention, prefill_kernels
from lockstep.engine.cuda.kernels.adapters import AdapterBank
from lockstep.engine.cuda.overlapped import OverlappedRunner
from lockstep.engine.cuda.prefill import Prefiller
from lockstep.engine.model.arithmetic import ExactOnDevice, mix_experts, route, swiglu
from tests.engine.cuda.test_overlapped import SMALL, alike, pytestmark  # noqa: F401
from tests.engine.model.test_lora import with_head
from tests.engine.rig import Rig, ids


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_attention, "KEYS", 16)
    monkeypatch.setattr(exact_attention, "SPLIT", 16)
    monkeypatch.setattr(exact_attention, "QUERIES", 16)
    monkeypatch.setattr(prefill_kernels, "ROWS", 16)
    monkeypatch.setattr(prefill, "SMALLEST", 8)
    monkeypatch.setattr(prefill, "SPARE_BLOCKS", 3)


def on_kernels(model: Path, places: int = 4) -> Rig:
    """Return an engine whose exact arithmetic is that of the kernels, as on a GPU."""
    rig = Rig(model, weight_version="v1", **SMALL)
    core = rig.core
    core.model.arithmetic = ExactOnDevice()
    bank = AdapterBank(core.config, places, 8, core.cache.k) if places else None
    decoder = Decoder(core.model, core.cache, GraphPool(), bank)
    core.model.prefiller = prefiller = Prefiller(core.model, core.cache, GraphPool(), 64, bank)
    core.overlapped = OverlappedRunner(
        decoder, prefiller, core.scheduler, core.runner, core.take, core.wipe
    )
    return rig


@pytest.mark.parametrize("places", [0, 4])
def test_adapters_and_plain_requests_in_one_batch(
    tiny: Path, lora_a: Path, lora_b: Path, places: int
) -> None:
    ours, theirs = on_kernels(tiny, places), Rig(tiny, weight_version="v1", **SMALL)
    for rig in (ours, theirs):
        rig.adopt("a", lora_a, "1")
        rig.adopt("b", lora_b, "1")
    requests = [(None, 5), ("a", 9), ("b", 6), ("a", 3)]
    pairs = [
        [rig.submit(ids(at, length), adapter=name, max_tokens=3) for rig in (ours, theirs)]
        for at, (name, length) in enumerate(requests)
    ]
    ours.run()
    theirs.run()
    for mine, its in pairs:
        alike(mine.one, its.one)
    assert ours.core.overlapped is not None
    assert all(adapted == bool(places) for _, adapted in ours.core.overlapped.decoder._tables)
    scored = ours.core.score(ids(1, 12), adapter="a")
    assert scored == pytest.approx(theirs.core.score(ids(1, 12), adapter="a"), abs=2e-5)
    assert scored != pytest.approx(ours.core.score(ids(1, 12)), abs=1e-3)


def test_an_adapter_evicted_by_a_scored_prompt_gets_a_place_again(
    tiny: Path, lora_a: Path, lora_b: Path
) -> None:
    ours, theirs = on_kernels(tiny, places=1), Rig(tiny, weight_version="v1", **SMALL)
    completions = []
    for rig in (ours, theirs):
        rig.adopt("a", lora_a, "1")
        rig.adopt("b", lora_b, "1")
        request = rig.submit(ids(1, 5), adapter="a", max_tokens=6)
        for _ in range(3):
            rig.core.step()
        rig.core.score(ids(2, 6), adapter="b")
        rig.run()
        completions.append(request.one)
    alike(*completions)


def test_an_adapter_of_the_head(tiny: Path, lora_a: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(lora_a, tmp_path / "copy")
    with_head(copy)
    ours, theirs = on_kernels(tiny), Rig(tiny, weight_version="v1", **SMALL)
    results = []
    for rig in (ours, theirs):
        rig.adopt("head", copy)
        rig.adopt("a", lora_a)
        both = [rig.submit(ids(1, 5), adapter=name, max_tokens=3) for name in ("head", "a")]
        rig.run()
        scores = [rig.core.score(ids(1, 12), adapter=name) for name in ("head", "a")]
        results.append(([each.one for each in both], scores))
    (mine, my_scores), (its, its_scores) = results
    for one, other in zip(mine, its, strict=True):
        alike(one, other)
    assert my_scores[0] == pytest.approx(its_scores[0], abs=2e-5)
    assert my_scores[0] != pytest.approx(my_scores[1], abs=1e-3)


def test_an_exact_engine_uses_no_other_kernels(
    tiny: Path, lora_a: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = on_kernels(tiny)
    rig.adopt("a", lora_a, "1")

    def other(*_: object, **__: object) -> None:
        raise AssertionError("computed by the model's own forward pass")

    monkeypatch.setattr(type(rig.core.model), "forward", other)
    rig.generate(ids(1, 5), max_tokens=2, adapter="a", prompt_logprobs=1)
    rig.core.score(ids(1, 12), adapter="a")


def test_a_mixture_of_experts_and_its_routed_experts(moe: Path) -> None:
    ours, theirs = on_kernels(moe), Rig(moe, weight_version="v1", **SMALL)
    pairs = [
        [rig.submit(ids(at, 4 + at), max_tokens=3, experts_start=0) for rig in (ours, theirs)]
        for at in range(3)
    ]
    ours.run()
    theirs.run()
    for mine, its in pairs:
        alike(mine.one, its.one)
        assert mine.one.experts is not None
        assert mine.one.experts == its.one.experts


def test_the_trainers_experts_have_the_gradients_of_plain_torch() -> None:
    torch.manual_seed(0)
    x, router = torch.randn(6, 16), torch.randn(4, 16)
    gate_up, down = torch.randn(4, 24, 16), torch.randn(4, 16, 12)
    weights, experts = route(F.linear(x, router), 2, True)
    results = []
    for mix in (trainer.mix, lambda *args: mix_experts(*args, product=F.linear, gate=swiglu)):
        leaves = [each.clone().requires_grad_() for each in (x, weights, gate_up, down)]
        out = mix(leaves[0], experts, *leaves[1:])
        slope = torch.linspace(-1, 1, out.numel()).view(out.shape)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, slope)))
    for mine, its in zip(*results, strict=True):
        torch.testing.assert_close(mine, its, rtol=2e-4, atol=2e-4)
