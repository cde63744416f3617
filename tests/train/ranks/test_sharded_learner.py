"""A learner on several ranks has the bits of a learner of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.tokens import Sample
from lockstep.train.learning.learner import Learner
from lockstep.train.records.run_dir import RunDirectory
from tests.ranks import run_ranks
from tests.train.ranks import learners
from tests.train.rollouts import sampled

pytestmark = pytest.mark.exact_arithmetic


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return sampled(count=6)


def test_steps_have_the_bits_of_one_process_with_any_number_of_ranks(
    samples: list[Sample], tmp_path: Path
) -> None:
    expected = learners.alone(tmp_path, samples)
    assert len(expected["first"]["passes"][0]) == 3
    assert expected["first"]["metrics"][0]["grad_norm"] > 0.1
    for result in run_ranks(2, tmp_path, learners.together, tmp_path, samples, {}):
        assert result == expected
    for result in run_ranks(3, tmp_path, learners.resumed, tmp_path, samples, {}):
        assert result == expected["second"]
    run = RunDirectory(tmp_path / "together")
    assert run.last_step() == 4
    learner = Learner(learners.config(run.path), exact=True, weights=run.checkpoint(2))
    learner.load_step(run, 2)
    other = RunDirectory(tmp_path / "one")
    other.start()
    assert learners.learn(learner, other, samples, 3) == expected["second"]
