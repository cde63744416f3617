"""Samplers: weights that never change, more of them than the fleet has room for at a time.

The weights of each lie in a directory. They are loaded into the fleet, and proved, when a sample
needs them; the one that was used least recently makes room.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path

from lockstep.fleet.fleet import Fleet
from lockstep.fleet.routing.affinity import Affinity
from lockstep.integrations.tinker.store import SamplerRecord, Store
from lockstep.protocol.common.request import GenerateRequest
from lockstep.tokens import Completion, Sampling
from lockstep.tokens.errors import NotFound, RolloutFailed, Unavailable

ATTEMPTS = 4
"""How often a sample is tried when no worker can serve it: workers that died are started again."""
RETRY_SECONDS = 1.0


class Samplers:
    """The samplers of one server, over the adapter slots of a fleet."""

    def __init__(self, fleet: Fleet, store: Store, base: str, slots: int) -> None:
        """`base` is the name under which the fleet serves the model, `slots` how many adapters it
        holds at once."""
        self._fleet = fleet
        self._store = store
        self._base = base
        self._slots = slots
        self._users: OrderedDict[str, int] = OrderedDict()
        self._locks: dict[str, asyncio.Lock] = {}
        self._freed = asyncio.Event()
        self._records: dict[str, SamplerRecord] = {}

    def find(self, sampler_id: str) -> SamplerRecord:
        """Raises NotFound."""
        record = self._records.get(sampler_id)
        if record is None:
            record = self._records[sampler_id] = self._store.sampler(sampler_id)
        return record

    async def sample(
        self, sampler_id: str, prompt_ids: list[int], sampling: Sampling
    ) -> list[Completion]:
        """Completions under the weights of this sampler.

        Raises NotFound for an unknown one, RolloutFailed for a completion that was aborted, as the
        API has no such end, and what the fleet raises.
        """
        record = self.find(sampler_id)
        for attempt in range(ATTEMPTS):
            try:
                async with self._served(record) as model:
                    completions = await self._generate(model, prompt_ids, sampling)
                    break
            except Unavailable:
                if attempt == ATTEMPTS - 1:
                    raise
                await asyncio.sleep(RETRY_SECONDS * 2**attempt)
        for completion in completions:
            if completion.finish == "abort":
                raise RolloutFailed(
                    f"the sample was aborted after {len(completion.token_ids)} tokens, as a worker "
                    "was stopped: it has no end that can be learnt from; send it again"
                )
        return completions

    async def _generate(
        self, model: str, prompt_ids: list[int], sampling: Sampling
    ) -> list[Completion]:
        request = GenerateRequest(prompt_ids=prompt_ids, sampling=sampling, model=model)
        affinity = Affinity.of(prompt_ids, adapter=model)
        return await self._fleet.pool.run(affinity, lambda worker: worker.generate(request))

    @asynccontextmanager
    async def _served(self, record: SamplerRecord) -> AsyncIterator[str]:
        """The name under which the fleet serves a sampler's weights, which stay for the block."""
        if record.directory is None:
            yield self._base
            return
        directory = Path(record.directory)
        name = _adapter_name(directory)
        taking = asyncio.create_task(self._take(name, directory))
        try:
            # To its end, also when the sample is cancelled: half a load is in nobody's books.
            await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(lambda task: self._give_if_taken(name, task))
            raise
        try:
            yield name
        finally:
            self._give(name)

    async def _take(self, name: str, directory: Path) -> None:
        """Loads an adapter unless it is loaded, and counts one more user of it."""
        async with self._locks.setdefault(name, asyncio.Lock()):
            if name not in self._users:
                await self._load(name, directory)
            self._users[name] += 1
            self._users.move_to_end(name)

    def _give(self, name: str) -> None:
        self._users[name] -= 1
        self._freed.set()

    def _give_if_taken(self, name: str, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._give(name)

    async def _load(self, name: str, directory: Path) -> None:
        while len(self._users) >= self._slots and self._idle() is None:
            self._freed.clear()
            await self._freed.wait()
        oldest = self._idle() if len(self._users) >= self._slots else None
        # The place is taken before the fleet is asked: two loads must not count on the same.
        self._users[name] = 1
        try:
            if oldest is not None:
                await self._unload(oldest)
            await self._fleet.load_adapter(name, str(directory))
            self._users[name] = 0
        except BaseException:
            del self._users[name]
            self._freed.set()
            raise

    async def _unload(self, name: str) -> None:
        """Makes room; whoever wants this adapter meanwhile waits, and loads it again."""
        async with self._locks[name]:
            del self._users[name]
            try:
                await self._fleet.unload_adapter(name)
            except BaseException:
                self._users[name] = 0
                raise

    def _idle(self) -> str | None:
        """The sampler that was used least recently, is not in use, and about to be by nobody."""
        return next(
            (
                name
                for name, users in self._users.items()
                if not users and not self._locks[name].locked()
            ),
            None,
        )


def _adapter_name(directory: Path) -> str:
    """A name for these very weights. Raises NotFound when they are gone."""
    try:
        changed = (directory / "adapter_model.safetensors").stat().st_mtime_ns
    except FileNotFoundError:
        raise NotFound("the weights of this sampler were deleted, or have expired") from None
    return f"tinker-{sha256(f'{directory} {changed}'.encode()).hexdigest()[:16]}"
