"""Scoring of many sequences at once gives the same values as scoring them alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.rig import Rig, ids

pytestmark = pytest.mark.exact_arithmetic


def test_sequences_score_equally_together_and_alone(tiny: Path) -> None:
    rig = Rig(tiny)
    sequences = [ids(seed, length) for seed, length in ((1, 2), (2, 9), (3, 70), (4, 200), (5, 1))]
    alone = [rig.core.score(sequence) for sequence in sequences]
    assert rig.core.score_all(sequences) == alone
    assert rig.core.score_all(sequences[::-1]) == alone[::-1]
    running = rig.submit(ids(9, 40), max_tokens=20, seed=1)
    rig.run(steps=3)
    assert rig.core.score_all(sequences) == alone
    rig.run()
    assert running.one == Rig(tiny).generate(ids(9, 40), max_tokens=20, seed=1)


def test_more_sequences_than_slots_are_scored_in_turns(tiny: Path) -> None:
    rig = Rig(tiny)
    sequences = [ids(seed, 9) for seed in range(3 * rig.core.cache.slots)]
    assert rig.core.score_all(sequences) == [rig.core.score(sequence) for sequence in sequences]
