"""A prepared model is exact in any batch of causal sequences, or rejects the batch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.engine import exact
from lockstep.tokens.errors import NotExact
from tests.engine import checkpoints
from tests.engine.rig import ids

pytestmark = pytest.mark.exact_arithmetic
LENGTHS = (5, 37, 1, 18, 64)
WIDTH = 71  # of no multiple


@pytest.fixture(scope="module", params=["tiny", "moe"])
def directory(request: pytest.FixtureRequest) -> Path:
    directory: Path = request.getfixturevalue(request.param)
    return directory


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    return checkpoints.trainer(directory)


@pytest.fixture(scope="module")
def sequences() -> list[list[int]]:
    return [ids(seed, length) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def alone(model: Any, sequences: list[list[int]]) -> list[Tensor]:
    """Logits of each sequence on its own, in the shape of the engine's."""
    multiple = exact.row_multiple_of(model)
    logits = []
    for sequence in sequences:
        padded = sequence + [0] * (-len(sequence) % multiple)
        with torch.no_grad():
            logits.append(model(input_ids=torch.tensor([padded])).logits[0, : len(sequence)])
    return logits


def padded(sequences: list[list[int]], side: str, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    rows, masks = [], []
    for sequence in sequences:
        pad, filled = [0] * (width - len(sequence)), [1] * len(sequence)
        rows.append(pad + sequence if side == "left" else sequence + pad)
        masks.append(pad + filled if side == "left" else filled + pad)
    return torch.tensor(rows), torch.tensor(masks)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_no_bit(
    model: Any, sequences: list[list[int]], alone: list[Tensor], side: str
) -> None:
    rows, mask = padded(sequences, side)
    with torch.no_grad():
        logits = model(input_ids=rows, attention_mask=mask).logits
    for row, expected in enumerate(alone):
        assert torch.equal(logits[row][mask[row].bool()], expected)


def test_a_sequence_has_the_bits_of_the_same_tokens_in_a_longer_one(
    model: Any, sequences: list[list[int]], alone: list[Tensor]
) -> None:
    for length in (1, 2, 3, 5, 7, 11, 13, 29):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([sequences[-1][:length]])).logits[0]
        assert torch.equal(logits, alone[-1][:length])


def test_padding_tokens_change_no_bit(
    model: Any, sequences: list[list[int]], alone: list[Tensor]
) -> None:
    rows, mask = padded(sequences, "left")
    with torch.no_grad():
        logits = model(input_ids=rows.masked_fill(mask == 0, 7), attention_mask=mask).logits
    assert all(torch.equal(logits[row, -len(e) :], e) for row, e in enumerate(alone))


def test_sequences_packed_into_one_row_change_no_bit(
    model: Any, sequences: list[list[int]], alone: list[Tensor]
) -> None:
    tokens = torch.tensor([[token for sequence in sequences for token in sequence]])
    positions = torch.tensor([[at for sequence in sequences for at in range(len(sequence))]])
    with torch.no_grad():
        logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits[0]
    for packed, expected in zip(logits.split(LENGTHS), alone, strict=True):
        assert torch.equal(packed, expected)


def test_a_custom_mask_of_four_dimensions_changes_no_bit(
    model: Any, sequences: list[list[int]], alone: list[Tensor]
) -> None:
    rows, mask = padded(sequences, "left")
    causal = torch.ones(WIDTH, WIDTH).tril().bool() & mask[:, None, None].bool()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    for mask in (causal, torch.where(causal, 0.0, torch.finfo(torch.float32).min)):
        with torch.no_grad():
            logits = model(input_ids=rows, attention_mask=mask, position_ids=positions).logits
        assert all(torch.equal(logits[row, -len(e) :], e) for row, e in enumerate(alone))


def test_the_last_logits_alone_and_a_cache_change_no_bit(
    model: Any, sequences: list[list[int]], alone: list[Tensor]
) -> None:
    rows, mask = padded(sequences, "left")
    with torch.no_grad():
        some = model(input_ids=rows, attention_mask=mask, logits_to_keep=3).logits
        whole = torch.tensor([sequences[-1]])
        first = model(input_ids=whole[:, :41], use_cache=True)
        rest = model(input_ids=whole[:, 41:], past_key_values=first.past_key_values).logits
    assert all(torch.equal(some[row, -len(e[-3:]) :], e[-3:]) for row, e in enumerate(alone))
    assert torch.equal(rest[0], alone[-1][41:])


def test_generating_with_padding_on_the_left_samples_what_the_model_would_alone(
    model: Any, sequences: list[list[int]]
) -> None:
    rows, mask = padded(sequences, "left")
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    together = model.generate(rows, attention_mask=mask, **options)[:, WIDTH:]
    for row, sequence in enumerate(sequences):
        one = model.generate(torch.tensor([sequence]), **options)[0, len(sequence) :]
        assert one.tolist() == together[row].tolist()


def test_padding_and_checkpointing_do_not_change_gradients(
    directory: Path, sequences: list[list[int]]
) -> None:
    model = exact.prepare(copy.deepcopy(checkpoints.trainer(directory)))
    rows, mask = padded(sequences, "left")

    def gradients() -> list[Tensor]:
        model.zero_grad()
        logits = model(input_ids=rows, attention_mask=mask, use_cache=False).logits
        logits[mask.bool()].logsumexp(-1).sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradients()
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert all(map(torch.equal, plain, gradients()))
    model.zero_grad()
    for sequence in sequences:
        model(input_ids=torch.tensor([sequence])).logits.logsumexp(-1).sum().backward()
    summed = [p.grad for p in model.parameters() if p.grad is not None]
    for one, other in zip(plain, summed, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("hidden", "reason"),
    [
        (torch.ones(8, 8).bool(), "keys after its own"),
        (torch.ones(8, 8).tril().bool() & ~torch.ones(8, 8).tril(-4).bool(), "sliding window"),
        (torch.ones(8, 8).tril().bool() & (torch.arange(8) != 3), "gap"),
    ],
)
def test_masks_that_the_engine_does_not_support_are_rejected(
    model: Any, hidden: Tensor, reason: str
) -> None:
    with torch.no_grad(), pytest.raises(NotExact, match=reason):
        model(input_ids=torch.arange(8)[None], attention_mask=hidden[None, None])


def test_compiling_a_prepared_model_is_rejected(model: Any) -> None:
    compiled = torch.compile(model, backend="eager", fullgraph=False)
    with torch.no_grad(), pytest.raises(Exception, match=r"torch\.compile gives other bits"):
        compiled(input_ids=torch.arange(8)[None])
