"""Runs the calls of one model in the order of their seq_id, whatever order they arrive in.

A call that is sent again gets the request id of the first and runs once. A rejected call counts as
done, so that later calls do not wait for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from lockstep.integrations.tinker.calls.futures import Futures, Pending, Result
from lockstep.tokens.errors import BadRequest, Conflict

log = logging.getLogger(__name__)
GAP_SECONDS = 330.0
"""How long to wait for a missing call. The SDK retries sending one for up to 300 s."""
Work = Callable[[], Awaitable[Result]]


@dataclass(frozen=True, slots=True)
class _Call:
    pending: Pending
    digest: bytes
    work: Work


class Sequencer:
    """Runs the calls of one model, one at a time, in the order of their seq_id."""

    def __init__(self, futures: Futures, *, first: int = 1, gap_seconds: float = GAP_SECONDS):
        self._futures = futures
        self._next = first
        self._gap_seconds = gap_seconds
        self._calls: dict[int, _Call] = {}
        self._arrived = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def submit(self, seq_id: int, digest: bytes, work: Work) -> Pending:
        """Return the request of this call; the existing one if the call was sent before.

        Raises BadRequest for a seq_id that was used for another call, or that was skipped. Not
        Conflict, which clients retry for minutes.
        """
        earlier = self._calls.get(seq_id)
        if earlier is not None:
            if earlier.digest != digest:
                raise BadRequest(
                    f"seq_id {seq_id} was used for another call of this model", param="seq_id"
                )
            return earlier.pending
        if seq_id < self._next:
            raise BadRequest(
                f"seq_id {seq_id} arrived too late: this model has already run seq_id "
                f"{self._next - 1}",
                param="seq_id",
            )
        pending = self._futures.open()
        self._calls[seq_id] = _Call(pending, digest, work)
        self._arrived.set()
        return pending

    def consume(self, seq_id: int, work: Work) -> None:
        """Run `work` in place of a rejected call, so that later calls do not wait for it."""
        if seq_id >= self._next and seq_id not in self._calls:
            self.submit(seq_id, b"rejected", work)

    async def close(self) -> None:
        """Stop. Calls that have not started never run."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            call = self._calls.get(self._next)
            if call is None:
                await self._wait()
                continue
            try:
                result = await call.work()
            except Exception as error:
                result = Result.failure(error)
            self._next += 1
            # Release the data of the call, but remember its digest.
            self._calls[self._next - 1] = _Call(call.pending, call.digest, _nothing)
            await self._futures.end(call.pending, result)

    async def _wait(self) -> None:
        """Wait for the next call. Fail the calls behind one that does not arrive in time."""
        # An idle client may wait for ever; a gap is an error once later calls wait behind it.
        behind = [seq for seq in self._calls if seq > self._next]
        self._arrived.clear()
        if not behind:
            await self._arrived.wait()
            return
        try:
            async with asyncio.timeout(self._gap_seconds):
                while self._next not in self._calls:
                    await self._arrived.wait()
                    self._arrived.clear()
        except TimeoutError:
            missing = self._next
            log.warning("seq_id %d did not arrive; calls after it fail", missing)
            for seq in sorted(seq for seq in self._calls if seq > missing):
                error = Conflict(
                    f"seq_id {missing} did not arrive, so this call of seq_id {seq} was not run: "
                    "continue from the last saved state"
                )
                await self._futures.end(self._calls[seq].pending, Result.failure(error))
                self._next = seq + 1


async def _nothing() -> Result:
    """Replace the work of a call that is done."""
    return Result.of({})
