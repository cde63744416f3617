"""Support: the sets that tokens were drawn from, in the smallest of three forms."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.tokens import Support
from lockstep.tokens.errors import BadSupport
from lockstep.tokens.support import ANY_VOCAB, support_row

VOCAB = 100


def of_sets(sets: list[set[int]], vocab: int = VOCAB) -> Support:
    rows = []
    for ids in sets:
        mask = np.zeros(vocab, dtype=bool)
        mask[sorted(ids)] = True
        rows.append(support_row(mask))
    return Support.of_rows(rows, vocab)


@given(st.data(), st.integers(1, 200))
def test_every_form_gives_back_the_sets(data: st.DataObject, vocab: int) -> None:
    ids = st.sets(st.integers(0, vocab - 1), min_size=1)
    sets = data.draw(st.lists(ids, max_size=5))
    support = of_sets(sets, vocab)
    expected = [sorted(ids) for ids in sets]
    whole = list(range(vocab))
    assert [ids or whole for ids in support.lists()] == expected
    assert [np.flatnonzero(row).tolist() for row in support.keep(vocab)] == expected
    assert Support.of_ids(expected, vocab) == support or vocab in map(len, expected)
    again = support.for_vocab(ANY_VOCAB).for_vocab(vocab)
    assert again == support
    middle = len(sets) // 2
    parts = [support.slice(0, middle), support.slice(middle, len(sets))]
    assert Support.join(parts).lists() == support.lists()
    for at in range(len(sets)):
        row = support.ids(at)
        assert (whole if row is None else row.tolist()) == expected[at]


@pytest.mark.parametrize(
    ("count", "nbytes"),
    [(1, 4), (4, 16), (5, 16), (50, 16), (95, 16), (97, 12), (99, 4), (100, 0)],
)
def test_a_set_takes_the_bytes_of_its_smallest_form(count: int, nbytes: int) -> None:
    assert len(bytes(of_sets([set(range(count))]).data)) == nbytes


def test_a_slice_shares_the_bytes() -> None:
    support = of_sets([{1, 2}, {3}, {4, 5, 6}])
    part = support.slice(1, 3)
    assert part.lists() == [[3], [4, 5, 6]]
    assert isinstance(part.data, memoryview)
    assert part.data.obj is support.data


def test_rows_without_a_set_are_not_taken_for_the_whole_vocabulary() -> None:
    support = Support.join([Support.unrecorded(2, VOCAB), Support.of_ids([[], [7]], VOCAB)])
    assert support.recorded().tolist() == [False, False, True, True]
    assert support.lists() == [[], [], [], [7]]
    with pytest.raises(BadSupport, match="no support was recorded for row 0"):
        support.keep(VOCAB)


@pytest.mark.parametrize(
    ("counts", "data", "vocab", "says"),
    [
        ([3], bytes(8), VOCAB, "take 12 bytes, but 8 came"),
        ([-1], b"", VOCAB, "outside 0 to 100"),
        ([101], b"", VOCAB, "outside 0 to 100"),
        ([1], bytes(3), VOCAB, "no multiple of 4"),
        ([], b"", 0, "vocabulary size 0"),
    ],
)
def test_malformed_parts_are_rejected(
    counts: list[int], data: bytes, vocab: int, says: str
) -> None:
    with pytest.raises(BadSupport, match=says):
        Support(np.array(counts, dtype="<i4").tobytes(), data, vocab)


@pytest.mark.parametrize("ids", [[3, 3], [4, 3], [-1, 3], [3, VOCAB]])
def test_sets_of_ids_that_are_not_ascending_are_rejected(ids: list[int]) -> None:
    with pytest.raises(BadSupport, match="not ascending"):
        Support.of_ids([ids], VOCAB)


@pytest.mark.failure_mode("F100")
def test_a_token_outside_its_own_set_is_rejected() -> None:
    support = Support.of_ids([[1, 2], [], [5]], VOCAB)
    support.check_contains([2, 99, 5])
    with pytest.raises(BadSupport, match="token 4 at position 2 is not in its own support of 1"):
        support.check_contains([2, 99, 4])
    with pytest.raises(BadSupport, match="2 token ids but 3 sets"):
        support.check_contains([1, 2])


def test_ids_outside_the_logits_are_rejected() -> None:
    with pytest.raises(BadSupport, match="contains token 7, but there are 5 logits"):
        Support.of_ids([[1, 7]]).keep(5)
