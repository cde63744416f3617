"""Affinity that survives workers joining and leaving, and a bound on the load it may cause."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.fleet.routing.affinity import RendezvousHash
from lockstep.tokens.errors import BadRequest

KEYS = [f"key {index}".encode() for index in range(2000)]


@dataclass(eq=False)
class Target:
    id: str
    in_flight: int = 0
    elsewhere: int = 0
    hash_index: int = -1


def hash_of(*names: str, load_factor: float = 1.25) -> tuple[RendezvousHash[Target], list[Target]]:
    hashed: RendezvousHash[Target] = RendezvousHash(load_factor)
    workers = [Target(name) for name in names]
    hashed.rebuild(workers)
    return hashed, workers


def owners(hashed: RendezvousHash[Target]) -> list[str]:
    return [one.id for key in KEYS if (one := hashed.pick(key)) is not None]


NAMES = st.lists(st.text(min_size=1, max_size=20), min_size=2, max_size=12, unique=True)


@settings(max_examples=25, deadline=None)
@given(NAMES, st.data())
def test_a_worker_that_leaves_moves_only_its_own_keys(
    names: list[str], data: st.DataObject
) -> None:
    hashed, workers = hash_of(*names)
    before = owners(hashed)
    gone = data.draw(st.sampled_from(workers))
    hashed.rebuild([one for one in workers if one is not gone])
    pairs = zip(before, owners(hashed), strict=True)
    assert all(was == now for was, now in pairs if was != gone.id)
    assert gone.hash_index == -1


@settings(max_examples=25, deadline=None)
@given(NAMES)
def test_a_worker_that_joins_takes_about_its_share_and_nothing_else_moves(names: list[str]) -> None:
    *names, joins = names
    hashed, workers = hash_of(*names)
    before = owners(hashed)
    hashed.rebuild([*workers, Target(joins)])
    moved = [now for was, now in zip(before, owners(hashed), strict=True) if was != now]
    assert set(moved) <= {joins}
    share = len(KEYS) / (len(names) + 1)
    assert 0.7 * share < len(moved) < 1.3 * share


@pytest.mark.parametrize("count", [2, 10, 100])
def test_keys_spread_evenly(count: int) -> None:
    hashed, _ = hash_of(*(f"w{index}" for index in range(count)))
    shares = Counter(one.id for n in range(200 * count) if (one := hashed.pick(b"%d" % n)))
    assert len(shares) == count
    assert max(shares.values()) < 1.35 * 200
    assert min(shares.values()) > 0.65 * 200


def test_the_order_of_the_members_does_not_matter() -> None:
    hashed, workers = hash_of("a", "b", "c")
    before = owners(hashed)
    hashed.rebuild(workers[::-1])
    assert owners(hashed) == before


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=120),
    st.sampled_from([1.0, 1.25, 2.0]),
)
def test_no_worker_gets_more_than_the_bound(
    count: int, steps: list[tuple[int, bool]], factor: float
) -> None:
    hashed, workers = hash_of(*(f"w{index}" for index in range(count)), load_factor=factor)
    running: list[Target] = []
    for key, ends in steps:
        if ends and running:
            hashed.end(running.pop(key % len(running)))
            continue
        mean = sum(one.in_flight for one in workers) / count
        chosen = hashed.pick(b"%d" % key)
        assert chosen is not None
        assert chosen.in_flight <= factor * mean + 1
        hashed.begin(chosen)
        running.append(chosen)
    assert sum(one.in_flight for one in workers) == len(running)


def test_a_hot_key_spills_to_the_next_in_its_own_order() -> None:
    hashed, _ = hash_of("a", "b", "c", "d")
    first = hashed.pick(b"hot")
    assert first is not None
    second = hashed.pick(b"hot", [first])
    chosen = []
    for _ in range(4):
        one = hashed.pick(b"hot")
        assert one is not None
        hashed.begin(one)
        chosen.append(one)
    assert chosen == [first, first, second, second]


def test_load_from_other_gateways_counts() -> None:
    hashed, _ = hash_of("a", "b")
    home = hashed.pick(b"key")
    assert home is not None
    home.elsewhere = 10
    hashed.weigh()
    spilled = hashed.pick(b"key")
    assert spilled is not None
    assert spilled is not home


def test_tried_workers_are_skipped_even_when_the_others_are_loaded() -> None:
    hashed, (a, b) = hash_of("a", "b")
    for _ in range(20):
        hashed.begin(b)
    assert hashed.pick(b"any", [a]) is b
    assert hashed.pick(b"any", [a, b]) is None


def test_an_empty_hash_picks_no_worker() -> None:
    hashed, _ = hash_of()
    assert hashed.pick(b"any") is None


def test_a_load_factor_below_one_is_rejected() -> None:
    with pytest.raises(BadRequest, match=r"load_factor is 0\.5"):
        RendezvousHash(0.5)
