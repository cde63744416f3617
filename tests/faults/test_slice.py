"""A short slice of the campaign of faults on real processes; `make chaos` runs the whole."""

from __future__ import annotations

import pytest

from tests.faults.campaign import campaign

SECONDS, SEED = 20.0, 7


@pytest.mark.failure_mode("F24")
@pytest.mark.failure_mode("F35")
@pytest.mark.timeout(300)
async def test_under_harm_every_answer_is_true_and_the_fleet_comes_back() -> None:
    made = await campaign(SECONDS, SEED, (2,), quiet=True)
    print(made.table())
    assert [(trial.faults, trial.wrong) for trial in made.trials if trial.wrong] == []
    assert sum(trial.answers for trial in made.trials) > 0
    assert sum(trial.turns for trial in made.trials) > 0
