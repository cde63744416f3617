"""Batches that skip unneeded work have the bits of the full computation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lockstep.engine.model.model import Segment
from tests.engine.rig import Rig, ids

pytestmark = pytest.mark.exact_arithmetic


@pytest.fixture
def rig(tiny: Path, lora_b: Path) -> Rig:
    rig = Rig(tiny, arithmetic="exact", max_seqs=8)
    rig.adopt("poet", lora_b)
    return rig


def run(rig: Rig, segments: list[Segment]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the requested hidden states, and the contents of the slots afterwards."""
    core = rig.core
    with torch.inference_mode():
        core.cache.k.zero_()
        core.cache.v.zero_()
        for slot in range(3):
            start = [Segment.whole(slot, 0, ids(slot, 90 + slot))]
            core.model.forward(core.served.weights, core.cache, core.model.batch(start))
        hidden = core.model.forward(core.served.weights, core.cache, core.model.batch(segments))
        return hidden, core.cache.k.clone(), core.cache.v.clone()


def mixed(rig: Rig, outputs: tuple[int, int, int]) -> list[Segment]:
    """Return two decoding segments, one with an adapter, a prompt, a chunk without outputs, and
    another."""
    poet = rig.core.served.adapter("poet")
    return [
        Segment.whole(0, 90, [5]),
        Segment.whole(1, 91, [6], poet),
        Segment(2, 92, ids(7, 130), outputs[0]),
        Segment(3, 0, ids(8, 70), outputs[1], poet),
        Segment(4, 0, ids(9, 33), outputs[2]),
    ]


@pytest.mark.parametrize("outputs", [(1, 0, 1), (0, 0, 0), (130, 0, 33), (3, 70, 1)])
def test_skipping_unrequested_hidden_states_changes_nothing(
    rig: Rig, outputs: tuple[int, int, int]
) -> None:
    whole, *slots = run(rig, mixed(rig, (130, 70, 33)))
    some, *same_slots = run(rig, mixed(rig, outputs))
    rows, end = [0, 1], 2
    for count, kept in zip((130, 70, 33), outputs, strict=True):
        end += count
        rows += range(end - kept, end)
    assert torch.equal(some[: len(rows)], whole[rows])
    for actual, expected in zip(same_slots, slots, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (2,), (0, 2), (1, 0)])
def test_decoding_does_not_depend_on_the_order_of_slots(rig: Rig, order: tuple[int, ...]) -> None:
    alone = {slot: run(rig, [Segment.whole(slot, 90 + slot, [40 + slot])])[0][0] for slot in order}
    together, *_ = run(rig, [Segment.whole(slot, 90 + slot, [40 + slot]) for slot in order])
    for row, slot in enumerate(order):
        assert torch.equal(together[row], alone[slot])


def test_a_prompt_without_outputs_skips_the_last_layer(rig: Rig) -> None:
    prompt = ids(1, 64)
    core = rig.core
    hidden, *_ = run(rig, [Segment(5, 0, prompt, 0)])
    assert hidden.shape[0] == 0
    batch = core.model.batch([Segment(5, 0, prompt, 1)])
    assert batch.tail is not None
    assert batch.tail.batch.count == 1


def test_a_model_with_experts_in_its_last_layer_records_them_for_all_tokens(moe: Path) -> None:
    rig = Rig(moe, arithmetic="exact", max_batch_tokens=32)
    completion = rig.generate(ids(1, 100), max_tokens=3, experts_start=0)
    again = rig.generate(ids(1, 100), max_tokens=3, experts_start=0, prompt_logprobs=0)
    assert completion.experts is not None
    assert completion.experts == again.experts
    assert len(set(completion.experts.numpy()[:, -1].flatten().tolist())) > 1
