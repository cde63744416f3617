"""A campaign of kills under load; `make test-scale SECONDS=120` runs it for longer."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.faults.traffic import Reference
from tests.scale.campaign.campaign import FAILOVER_SECONDS, Campaign
from tests.scale.campaign.deployment import Deployment

SEED = 7


@pytest.mark.timeout(900)
@pytest.mark.failure_mode("F61")
async def test_nothing_answered_is_lost_or_mislabelled_whoever_is_killed(tmp_path: Path) -> None:
    seconds = float(os.environ.get("CAMPAIGN_SECONDS", "20"))
    reference = Reference(tmp_path)
    async with Deployment() as deployment:
        campaign = Campaign(deployment, reference, random.Random(SEED))
        await campaign.run(seconds)
    print(campaign.report())
    assert campaign.wrong == []
    assert len(campaign.harms) == 9
    assert min(campaign.answers, campaign.turns) > 50
    assert max(campaign.failovers) < FAILOVER_SECONDS
