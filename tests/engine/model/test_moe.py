"""Routed experts: the router's choices, row by row, however the rows were computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from lockstep.engine import exact
from lockstep.tokens.errors import BadRequest
from tests.engine.checkpoints import trainer
from tests.engine.rig import Rig, ids

PROMPT = ids(1, 100)


@pytest.fixture
def rig(moe: Path) -> Rig:
    return Rig(moe, weight_version="v1", max_batch_tokens=48, max_seqs=4)


def routed(directory: Path, token_ids: list[int]) -> npt.NDArray[np.integer]:
    """Return the trainer's routed experts, (tokens, layers, top_k), most likely first."""
    model = trainer(directory)
    multiple = exact.row_multiple_of(model)
    width = -(-len(token_ids) // multiple) * multiple
    padded = torch.tensor([token_ids + [0] * (width - len(token_ids))])
    with torch.no_grad():
        logits = model(input_ids=padded, output_router_logits=True).router_logits
    top = [layer.topk(model.config.num_experts_per_tok, dim=-1).indices for layer in logits]
    return torch.stack(top, dim=1)[: len(token_ids)].numpy()


@pytest.mark.exact_arithmetic
def test_rows_are_the_routers_choices(rig: Rig, moe: Path) -> None:
    completion = rig.generate(PROMPT, experts_start=0, max_tokens=20)
    assert completion.experts is not None
    assert (completion.experts.shape, completion.experts.dtype, completion.experts.start) == (
        (119, 2, 2),
        "uint8",
        0,
    )
    expected = routed(moe, PROMPT + completion.token_ids)[:-1]
    assert (completion.experts.numpy() == expected).all()


@pytest.mark.parametrize("start", [0, 1, 99, 100, 105, 119, 500])
def test_rows_start_at_the_requested_token(rig: Rig, start: int) -> None:
    whole = rig.generate(PROMPT, experts_start=0, max_tokens=20).experts
    part = rig.generate(PROMPT, experts_start=start, max_tokens=20).experts
    assert whole is not None
    assert part is not None
    assert (part.start, part.rows) == (start, max(119 - start, 0))
    assert (part.numpy() == whole.numpy()[start:]).all()


def test_rows_are_returned_only_on_request(rig: Rig) -> None:
    assert rig.generate(PROMPT).experts is None
    with pytest.raises(BadRequest, match="-1 is negative"):
        rig.submit(PROMPT, experts_start=-1)
    assert rig.idle


@pytest.mark.exact_arithmetic
def test_rows_are_the_same_through_prefix_hits_and_chunks(rig: Rig, moe: Path) -> None:
    whole = Rig(moe, weight_version="v1", max_batch_tokens=4096).generate(
        PROMPT, experts_start=0, max_tokens=20
    )
    cold = rig.generate(PROMPT, experts_start=0, max_tokens=20)
    hits = rig.core.prefixes.hits
    crowd = [rig.submit(ids(9 + i, 30), max_tokens=30) for i in range(2)]
    warm = rig.submit(PROMPT, experts_start=0, max_tokens=20)
    rig.run()
    assert rig.core.prefixes.hits - hits == 96
    assert cold == whole
    assert warm.one == whole
    assert all(result.ended for result in crowd)


@pytest.mark.exact_arithmetic
def test_each_choice_has_its_own_rows(rig: Rig, moe: Path) -> None:
    result = rig.submit(PROMPT, n=5, experts_start=0, max_tokens=6, temperature=3.0)
    rig.run()
    for completion in result.completions:
        assert completion.experts is not None
        assert (completion.experts.numpy() == routed(moe, PROMPT + completion.token_ids)[:-1]).all()


@pytest.mark.exact_arithmetic
@pytest.mark.parametrize("swaps", [1, 2])
def test_a_swap_keeps_the_rows_of_tokens_sampled_before_it(
    rig: Rig, moe: Path, moe2: Path, swaps: int
) -> None:
    result = rig.submit(PROMPT, experts_start=0, max_tokens=20)
    rig.run(9)
    forwarded = 100 + len(result.tokens_so_far) - 1
    assert 100 < forwarded < 115
    rig.pause("keep")
    rig.load(moe2, "v2")
    rig.core.resume()
    if swaps == 2:
        rig.run(1)  # not all of the context is computed again yet
        rig.load(moe2, "v3")
    rig.run()
    completion = result.one
    assert completion.experts is not None
    whole = PROMPT + completion.token_ids
    rows = completion.experts.numpy()
    assert (rows[:forwarded] == routed(moe, whole)[:forwarded]).all()
    assert (rows[forwarded:] == routed(moe2, whole)[forwarded:-1]).all()


@pytest.mark.exact_arithmetic
def test_an_abort_after_a_swap_still_has_its_rows(rig: Rig, moe: Path, moe2: Path) -> None:
    result = rig.submit(PROMPT, experts_start=0, max_tokens=20)
    rig.run(8)
    rig.pause("keep")
    rig.load(moe2, "v2")
    rig.pause("abort")
    completion = result.one
    assert completion.finish == "abort"
    assert completion.experts is not None
    assert (completion.experts.numpy() == routed(moe, PROMPT + completion.token_ids)[:-1]).all()


def test_an_abort_in_the_prompt_has_no_rows(rig: Rig) -> None:
    result = rig.submit(PROMPT, experts_start=0)
    rig.run(1)
    rig.pause("abort")
    assert result.one.experts is None
