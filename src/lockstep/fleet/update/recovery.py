"""Recovery of a fleet in which no worker serves: an update on quarantined workers that respond."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress

from lockstep.fleet.routing.pool import Pool
from lockstep.fleet.worker import Worker
from lockstep.tokens.errors import LockstepError, Unavailable
from lockstep.tokens.operation import Operation

SETTLE_SECONDS = 5.0
"""Time for workers that are being brought up at this moment: they serve or fail soon."""
RESPOND_SECONDS = 5.0


async def workers_to_update(workers: Sequence[Worker], operation: Operation) -> list[Worker]:
    """Return the serving workers; if there are none, the quarantined ones that respond. The
    operation gets a warning then. Raises Unavailable when no worker responds either."""
    if serving := [worker for worker in workers if worker.serves]:
        return serving
    responding = await _find_quarantined(workers)
    if not responding:
        raise Unavailable(f"none of {len(workers)} workers is serving")
    names = ", ".join(worker.id for worker in responding)
    operation.warnings.append(
        f"no worker was serving: the update ran on {names}, quarantined until then"
    )
    return responding


async def serve_again(pool: Pool, workers: Sequence[Worker], seconds: float) -> None:
    """Bring workers up at once, and wait for the first of them."""
    for worker in workers:
        pool.check(worker.id)
    if workers:
        with suppress(Unavailable):
            await pool.wait_ready(1, seconds)


async def _find_quarantined(workers: Sequence[Worker]) -> list[Worker]:
    """Return the quarantined workers that respond, once none is being brought up any more. Their
    contents are unknown: each is treated as if no version had been proved on it."""
    deadline = asyncio.get_running_loop().time() + SETTLE_SECONDS
    while any(worker.state in ("syncing", "proving") for worker in workers):
        if asyncio.get_running_loop().time() > deadline:
            break
        await asyncio.sleep(0.05)
    responding = await _find_responding(
        worker for worker in workers if worker.state == "quarantined"
    )
    for worker in responding:
        worker.version = None
    return responding


async def _find_responding(workers: Iterable[Worker]) -> list[Worker]:
    async def responds(worker: Worker) -> bool:
        try:
            async with asyncio.timeout(RESPOND_SECONDS):
                await worker.control.view()
        except (LockstepError, TimeoutError):
            return False
        return True

    candidates = list(workers)
    results = await asyncio.gather(*map(responds, candidates))
    return [worker for worker, ok in zip(candidates, results, strict=True) if ok]
