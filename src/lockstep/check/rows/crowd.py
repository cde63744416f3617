"""Many at once: what some servers die of, and so asked at the very end."""

from __future__ import annotations

import asyncio

from lockstep.check.compare import all_apart, shown
from lockstep.check.outcome import require
from lockstep.check.row import RowGroup
from lockstep.check.target import Target

GROUP = RowGroup("crowd")


@GROUP.row("scores", "prompts scored at once score as they do alone", "L1 F46")
async def scores(target: Target) -> str:
    prompts = [target.prompt(length, seed=length) for length in (9, 24, 40, 77, 130, 200)]
    alone = await target.scores(prompts)
    together = list(await asyncio.gather(*(target.score(ids) for ids in prompts)))
    off = all_apart(alone, together)
    count = sum(map(len, alone))
    said = f"{count} tokens of {len(prompts)} prompts, alone and at once: {shown(off)}"
    require(off <= target.tolerance, f"{said} (tolerance {target.tolerance:g})")
    health = await target.send_ids(target.prompt())
    require(health.status == 200, f"{said}; after that a good request: {health.said()}")
    return said
