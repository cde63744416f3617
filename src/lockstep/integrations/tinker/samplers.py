"""Samplers: weights that never change, more of them than the fleet has room for at a time.

The weights of each lie in a directory. They are loaded into the fleet, and proved, when a sample
needs them; the one that was used least recently makes room.
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
from lockstep.integrations.tinker.store import SamplerRecord
from lockstep.integrations.tinker.training.lora import WEIGHTS
from lockstep.protocol.common.request import GenerateRequest
from lockstep.tokens import Completion, Sampling
from lockstep.tokens.errors import Conflict, LockstepError, NotFound, RolloutFailed, Unavailable

log = logging.getLogger(__name__)
PREFIX = "tinker-"
"""How the names of samplers' adapters begin, by which they are told from an operator's own."""
ATTEMPTS = 4
"""How often a sample is tried when no worker can serve it: workers that died are started again."""
RETRY_SECONDS = 1.0


class Samplers:
    """Samplers over the adapter slots of a fleet, which other dialects may use as well."""

    def __init__(self, fleet: Fleet, base: str, slots: int, *, labelled: bool = False) -> None:
        """`base` is the name under which the fleet serves the model, `slots` how many adapters it
        holds at once. `labelled` is for workers that give an adapter no label of its contents: its
        name is its label then."""
        self._fleet = fleet
        self._base = base
        self._slots = slots
        self._labelled = labelled
        self._users: OrderedDict[str, int] = OrderedDict()
        self._locks: dict[str, asyncio.Lock] = {}
        self._freed = asyncio.Event()

    async def adopt(self) -> None:
        """Takes over what an earlier process left loaded; what is deleted by now is unloaded."""
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
        """Unloads all of them: the next process loads what it needs."""
        for name in list(self._users):
            try:
                await self._fleet.unload_adapter(name)
            except LockstepError as error:
                log.warning("sampler %s stays loaded: %s", name, error.message)

    async def forget(self, directory: Path) -> None:
        """Unloads the sampler of these weights, which are about to be deleted: a worker that comes
        back later could not load them any more."""
        if (directory / WEIGHTS).exists() and (name := adapter_name(directory)) in self._users:
            await self._unload(name)

    async def serve(self, directory: Path | None) -> str:
        """The name under which the fleet serves these weights, or the base model's; they are the
        last to make room for others."""
        async with self._served(directory) as name:
            return name

    async def sample(
        self,
        record: SamplerRecord,
        prompt_ids: list[int],
        sampling: Sampling,
        cache_salt: str | None = None,
    ) -> list[Completion]:
        """Completions under the weights of this sampler.

        Raises NotFound when they were deleted, RolloutFailed for a completion that was aborted, as
        the API has no such end, and what the fleet raises.
        """
        self.check_base()
        directory = None if record.directory is None else Path(record.directory)
        for attempt in range(ATTEMPTS):
            try:
                async with self._served(directory) as model:
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
                    f"the sample was aborted after {len(completion.token_ids)} tokens, as a worker "
                    "was stopped: it has no end that can be learnt from; send it again"
                )
        return completions

    def check_base(self) -> None:
        """Raises Conflict when the fleet's weights are no longer those that are trained on."""
        desired = self._fleet.desired
        if desired.checkpoint is not None or len(desired.agreed) > 1:
            raise Conflict(
                f"the fleet serves version {desired.version!r}, and adapters are trained on the "
                "weights that it was started with: start again with --fresh, or with the "
                "directory of those weights as MODEL"
            )

    async def _generate(self, request: GenerateRequest) -> list[Completion]:
        affinity = Affinity.of(request.prompt_ids, adapter=request.model, salt=request.cache_salt)
        return await self._fleet.pool.run(affinity, lambda worker: worker.generate(request))

    @asynccontextmanager
    async def _served(self, directory: Path | None) -> AsyncIterator[str]:
        """The name under which the fleet serves these weights, which stay for the block; the base
        model where there are none."""
        if directory is None:
            yield self._base
            return
        name = adapter_name(directory)
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
            if name in self._users and name not in self._fleet.desired.adapters:
                del self._users[name]  # an operator has unloaded it
            if name not in self._users:
                await self._load(name, directory)
            self._users[name] += 1
            self._users.move_to_end(name)

    def _give(self, name: str) -> None:
        if name in self._users:  # it may have been forgotten meanwhile
            self._users[name] -= 1
        self._freed.set()

    def _give_if_taken(self, name: str, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._give(name)

    async def _load(self, name: str, directory: Path) -> None:
        while len(self._users) >= self._room() and self._idle() is None:
            self._freed.clear()
            await self._freed.wait()
        oldest = self._idle() if len(self._users) >= self._room() else None
        # The place is taken before the fleet is asked: two loads must not count on the same.
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
        """Makes room; whoever wants this adapter meanwhile waits, and loads it again."""
        async with self._locks[name]:
            del self._users[name]
            try:
                await self._fleet.unload_adapter(name)
            except BaseException:
                self._users[name] = 0
                raise

    def _room(self) -> int:
        """How many samplers may be loaded. Raises Conflict when others have all the slots."""
        others = sum(not name.startswith(PREFIX) for name in self._fleet.desired.adapters)
        if others >= self._slots:
            raise Conflict(
                f"{others} adapters were loaded by others, which is the limit of the workers: "
                "unload one (`lockstep unload-lora NAME`), or start with more --max-loras"
            )
        return self._slots - others

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


def adapter_name(directory: Path) -> str:
    """A name for these very weights. Raises NotFound when they are gone."""
    try:
        changed = (directory / WEIGHTS).stat().st_mtime_ns
    except FileNotFoundError:
        raise NotFound("the weights of this sampler were deleted, or have expired") from None
    return f"{PREFIX}{sha256(f'{directory} {changed}'.encode()).hexdigest()[:16]}"
