"""Runs the campaign for --seconds with --seed; ends with 1 after a violation."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from pathlib import Path

from tests.faults.traffic import Reference
from tests.scale.campaign.campaign import Campaign
from tests.scale.campaign.deployment import Deployment


async def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        reference = Reference(Path(directory))
        async with Deployment() as deployment:
            campaign = Campaign(deployment, reference, random.Random(options.seed))
            await campaign.run(options.seconds)
    print(f"seed {options.seed}: {campaign.report()}")
    for wrong in campaign.wrong:
        print("WRONG:", wrong)
    return 1 if campaign.wrong else 0


sys.exit(asyncio.run(main()))
