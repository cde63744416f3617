"""The way out when no worker serves: an update on those in quarantine that still respond."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from lockstep.fleet.worker import Worker
from lockstep.tokens.errors import LockstepError

SETTLE_SECONDS = 5.0
"""For workers that are being brought up at this moment: they serve soon, or fail soon."""
RESPOND_SECONDS = 5.0


async def quarantined(workers: Sequence[Worker]) -> list[Worker]:
    """The quarantined workers that respond, once none is being brought up any more.

    They hold nobody knows what: each is as one of which no version was ever proved.
    """
    deadline = asyncio.get_running_loop().time() + SETTLE_SECONDS
    while any(worker.state in ("syncing", "proving") for worker in workers):
        if asyncio.get_running_loop().time() > deadline:
            break
        await asyncio.sleep(0.05)
    found = await _responding(worker for worker in workers if worker.state == "quarantined")
    for worker in found:
        worker.version = None
    return found


async def _responding(workers: Iterable[Worker]) -> list[Worker]:
    async def responds(worker: Worker) -> bool:
        try:
            async with asyncio.timeout(RESPOND_SECONDS):
                await worker.control.view()
        except (LockstepError, TimeoutError):
            return False
        return True

    asked = list(workers)
    results = await asyncio.gather(*map(responds, asked))
    return [worker for worker, well in zip(asked, results, strict=True) if well]
