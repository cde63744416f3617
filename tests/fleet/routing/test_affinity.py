"""Requests that could share a cached prefix get the same route, however their ids were encoded."""

from __future__ import annotations

import json

import msgspec
import pytest

from lockstep.fleet.routing.affinity import Affinity
from lockstep.protocol.json.lazy_ids import LazyIds


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" ,\n", ":")])
@pytest.mark.parametrize("count", [1, 63, 64, 255, 256, 257, 3000])
@pytest.mark.parametrize("step", [1, 10**8])
def test_ids_route_alike_decoded_or_not(count: int, step: int, separators: tuple[str, str]) -> None:
    ids = [step * at for at in range(count)]
    raw = LazyIds.of(msgspec.Raw(json.dumps(ids, separators=separators).encode()))
    assert raw is not None
    assert Affinity.of(raw) == Affinity.of(ids)


def test_only_the_first_blocks_of_a_prompt_count() -> None:
    ids = list(range(300))
    raw = LazyIds.of(msgspec.Raw(msgspec.json.encode([*ids[:256], 7, 8, 9])))
    assert raw is not None
    assert Affinity.of(ids) == Affinity.of(raw) == Affinity.of([*ids[:256], 1])
    assert Affinity.of(ids) != Affinity.of([*ids[:255], 0, *ids[256:]])
    assert Affinity.of(ids) != Affinity.of(ids, salt="other") != Affinity.of(ids, adapter="lora")
    assert Affinity.of([1, 2]) != Affinity.of([1, 2, 3])
    assert Affinity.of(ids[:64]) == Affinity.of(ids[:70])
