"""Many concurrent requests: the last row, because it kills some servers."""

from __future__ import annotations

import asyncio

from lockstep.check.outcome import describe, largest_difference, require
from lockstep.check.row import RowGroup
from lockstep.check.target import Target

GROUP = RowGroup("crowd")


@GROUP.row("scores", "prompts scored in one batch get the scores they get alone", "L1 F46")
async def scores(target: Target) -> str:
    prompts = [target.prompt(length, seed=length) for length in (9, 24, 40, 77, 130, 200)]
    alone = await target.scores(prompts)
    together = list(await asyncio.gather(*(target.score(ids) for ids in prompts)))
    off = largest_difference(alone, together)
    count = sum(map(len, alone))
    evidence = f"{count} tokens of {len(prompts)} prompts, alone and at once: {describe(off)}"
    require(off <= target.tolerance, f"{evidence} (tolerance {target.tolerance:g})")
    health = await target.send_ids(target.prompt())
    require(health.status == 200, f"{evidence}; after that a good request: {health.describe()}")
    return evidence
