"""Samplers: immutable weights, of which there may be more than the fleet has adapter slots.

The weights of each sampler are in a directory. They are loaded into the fleet and proved when a
sample needs them; the least recently used sampler is evicted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path

from lockstep.fleet.fleet import Fleet
from lockstep.fleet.routing.affinity import Affinity
from lockstep.integrations.tinker.tinker_store import SamplerRecord
from lockstep.integrations.tinker.training.lora_tensors import WEIGHTS
from lockstep.protocol.common.request import GenerateRequest
from lockstep.tokens import Completion, Sampling
from lockstep.tokens.errors import Conflict, LockstepError, NotFound, RolloutFailed, Unavailable

log = logging.getLogger(__name__)
PREFIX = "tinker-"
"""Prefix of the adapter names of samplers, which tells them from an operator's adapters."""
ATTEMPTS = 4
"""Attempts of a sample when no worker can serve it: dead workers are being restarted."""
RETRY_SECONDS = 1.0


class Samplers:
    """Samplers in the adapter slots of a fleet, which other dialects may use as well."""

    def __init__(self, fleet: Fleet, base: str, slots: int, *, labelled: bool = False) -> None:
        """The fleet serves the model as `base` and holds up to `slots` adapters.

        With `labelled` the version of an adapter is its name: some workers report no version.
        """
        self._fleet = fleet
        self._base = base
        self._slots = slots
        self._labelled = labelled
        self._users: OrderedDict[str, int] = OrderedDict()
        self._locks: dict[str, asyncio.Lock] = {}
        self._freed = asyncio.Event()

    async def adopt(self) -> None:
        """Take over the adapters that an earlier process left loaded; unload deleted ones."""
        for name, spec in list(self._fleet.desired.adapters.items()):
            if not name.startswith(PREFIX):
                continue
            directory = Path(spec.path)
            if (directory / WEIGHTS).exists() and adapter_name(directory) == name:
                self._locks[name] = asyncio.Lock()
                self._users[name] = 0
            else:
                await self._fleet.unload_adapter(name)

    async def close(self) -> None:
        """Unload all samplers. The next process loads what it needs."""
        for name in list(self._users):
            try:
                await self._fleet.unload_adapter(name)
            except LockstepError as error:
                log.warning("sampler %s could not be unloaded: %s", name, error.message)

    async def forget(self, directory: Path) -> None:
        """Unload the sampler of weights that are about to be deleted.

        A restarted worker could not load them any more.
        """
        if (directory / WEIGHTS).exists() and (name := adapter_name(directory)) in self._users:
            await self._unload(name)

    async def serve(self, directory: Path | None) -> str:
        """Load these weights if needed, and return the model name under which they are served.

        Without a directory that is the base model.
        """
        async with self._loaded(directory) as name:
            return name

    async def sample(
        self,
        record: SamplerRecord,
        prompt_ids: list[int],
        sampling: Sampling,
        cache_salt: str | None = None,
    ) -> list[Completion]:
        """Return completions under the weights of this sampler.

        Raises NotFound when the weights were deleted, RolloutFailed for an aborted completion (the
        API has no such stop reason), and what the fleet raises.
        """
        self.check_base()
        directory = None if record.directory is None else Path(record.directory)
        for attempt in range(ATTEMPTS):
            try:
                async with self._loaded(directory) as model:
                    request = GenerateRequest(
                        prompt_ids=prompt_ids, sampling=sampling, model=model, cache_salt=cache_salt
                    )
                    completions = await self._generate(request)
                    break
            except Unavailable:
                if attempt == ATTEMPTS - 1:
                    raise
                await asyncio.sleep(RETRY_SECONDS * 2**attempt)
        for completion in completions:
            if completion.finish == "abort":
                raise RolloutFailed(
                    f"the sample was aborted after {len(completion.token_ids)} tokens because a "
                    "worker stopped: send it again"
                )
        return completions

    def check_base(self) -> None:
        """Raise Conflict when the fleet no longer serves the weights that are trained on."""
        desired = self._fleet.desired
        if desired.checkpoint is not None or len(desired.agreed) > 1:
            raise Conflict(
                f"the fleet serves version {desired.version!r}, but adapters are trained on the "
                "weights it was started with: restart with --fresh, or with the directory of the "
                "served weights as MODEL"
            )

    async def _generate(self, request: GenerateRequest) -> list[Completion]:
        affinity = Affinity.of(request.prompt_ids, adapter=request.model, salt=request.cache_salt)
        return await self._fleet.pool.run(
            affinity, lambda worker: worker.generate(request), request
        )

    @asynccontextmanager
    async def _loaded(self, directory: Path | None) -> AsyncIterator[str]:
        """Load these weights and keep them loaded within the block; yield their model name."""
        if directory is None:
            yield self._base
            return
        name = adapter_name(directory)
        taking = asyncio.create_task(self._take(name, directory))
        try:
            # Finish the load even if the sample is cancelled, or the slot would be lost.
            await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(lambda task: self._release_if_taken(name, task))
            raise
        try:
            yield name
        finally:
            self._release(name)

    async def _take(self, name: str, directory: Path) -> None:
        """Load an adapter unless it is loaded, and count one more user of it."""
        # One lock per adapter: a load must not overlap an unload of the same name.
        async with self._locks.setdefault(name, asyncio.Lock()):
            if name in self._users and name not in self._fleet.desired.adapters:
                del self._users[name]  # an operator has unloaded it
            if name not in self._users:
                await self._load(name, directory)
            self._users[name] += 1
            self._users.move_to_end(name)

    def _release(self, name: str) -> None:
        if name in self._users:  # it may have been unloaded meanwhile
            self._users[name] -= 1
        self._freed.set()

    def _release_if_taken(self, name: str, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._release(name)

    async def _load(self, name: str, directory: Path) -> None:
        while len(self._users) >= self._capacity() and self._idle() is None:
            self._freed.clear()
            await self._freed.wait()
        oldest = self._idle() if len(self._users) >= self._capacity() else None
        # Reserve the slot before the slow load, so that two loads never use the same one.
        self._users[name] = 1
        try:
            if oldest is not None:
                await self._unload(oldest)
            label = name if self._labelled else None
            await self._fleet.load_adapter(name, str(directory), version=label)
            self._users[name] = 0
        except BaseException:
            del self._users[name]
            self._freed.set()
            raise

    async def _unload(self, name: str) -> None:
        """Unload an adapter. Requests for it wait for the lock and load it again."""
        async with self._locks[name]:
            del self._users[name]
            try:
                await self._fleet.unload_adapter(name)
            except BaseException:
                self._users[name] = 0
                raise

    def _capacity(self) -> int:
        """Return how many samplers may be loaded. Raises Conflict when others use all slots."""
        others = sum(not name.startswith(PREFIX) for name in self._fleet.desired.adapters)
        if others >= self._slots:
            raise Conflict(
                f"{others} adapters of an operator use all slots of the workers: unload one "
                "(`lockstep unload-lora NAME`), or start with more --max-loras"
            )
        return self._slots - others

    def _idle(self) -> str | None:
        """Return the least recently used sampler that is neither in use nor being loaded."""
        return next(
            (
                name
                for name, users in self._users.items()
                if not users and not self._locks[name].locked()
            ),
            None,
        )


def adapter_name(directory: Path) -> str:
    """Return an adapter name for exactly these weights. Raises NotFound when they are gone."""
    try:
        changed = (directory / WEIGHTS).stat().st_mtime_ns
    except FileNotFoundError:
        raise NotFound("the weights of this sampler were deleted, or have expired") from None
    return f"{PREFIX}{sha256(f'{directory} {changed}'.encode()).hexdigest()[:16]}"
