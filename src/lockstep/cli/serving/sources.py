"""Sources of a gateway's workers: processes started by this command, or workers that run
already.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from lockstep.cli.serving.model_identity import ModelIdentity, served_model
from lockstep.tokens import LogprobMode
from lockstep.tokens.errors import Unavailable

if TYPE_CHECKING:
    from lockstep.fleet.fleet import Fleet
    from lockstep.launch.placement import Placement
    from lockstep.launch.supervisor import Child, Supervisor

log = logging.getLogger(__name__)
WorkerRows = list[dict[str, object]]
ShowStatus = Callable[[str], None]
READY_SECONDS = 30.0
LATE_SECONDS = 0.5
"""Interval between two attempts to reach a worker that does not respond yet."""
JOINED_SECONDS = 1.0
"""Grace period in which workers that have just joined may be proved after the wait is over."""


@dataclass(frozen=True, slots=True)
class StartedWorker:
    """A worker that this command has started, for a gateway in another process."""

    id: str
    url: str
    admin_url: str
    pid: int | None
    backend: str
    logprob_mode: LogprobMode | None = None
    gpus: tuple[str, ...] = ()

    def body(self, token: str) -> dict[str, object]:
        """Return the body of POST /v1/rl/workers that adds it."""
        return {
            "id": self.id,
            "url": self.url,
            "admin_url": self.admin_url,
            "backend": self.backend,
            "admin_token": token if self.backend == "lockstep" else None,
            "logprob_mode": self.logprob_mode,
            "gpus": self.gpus,
        }

    @property
    def row(self) -> dict[str, object]:
        """The worker in the ready line."""
        return {
            "id": self.id,
            "url": self.url,
            "system_url": self.admin_url,
            "pid": self.pid,
            "gpus": self.gpus,
        }


@runtime_checkable
class StartsWorkers(Protocol):
    """A source that can start its workers for gateways in other processes."""

    def started(
        self, token: str, show: ShowStatus
    ) -> AbstractAsyncContextManager[list[StartedWorker]]:
        """Run the workers while the block runs; `token` is their admin token."""
        ...


class WorkerSource(Protocol):
    """Workers for a fleet. `starts_workers` says that they start with the model's own weights."""

    @property
    def starts_workers(self) -> bool: ...

    async def identity(self) -> ModelIdentity:
        """Return the identity of the served model. Raises Unavailable if no worker responds."""
        ...

    def joined(
        self, fleet: Fleet, token: str, show: ShowStatus
    ) -> AbstractAsyncContextManager[WorkerRows]:
        """Keep the workers in the fleet while the block runs; yield one row per worker."""
        ...


@dataclass(frozen=True, slots=True)
class EmbeddedWorkers:
    """Workers with the embedded engine, started by this command."""

    model: str
    count: int
    arguments: tuple[str, ...]
    drain_seconds: float
    placement: Placement | None = None
    starts_workers = True

    async def identity(self) -> ModelIdentity:
        """The identity of the model's files."""
        return ModelIdentity.of_files(self.model)

    @asynccontextmanager
    async def joined(self, fleet: Fleet, token: str, show: ShowStatus) -> AsyncIterator[WorkerRows]:
        """Run workers and fleet while the block runs."""
        from lockstep.backends.lockstep.admin import LockstepAdmin

        pool = fleet.pool

        def count_up(_: Child) -> None:
            up = sum(child.state == "running" for child in children.children)
            show(f"Starting {self.model}: {up} of {self.count} workers ready")

        def restarted(child: Child) -> None:
            if any(worker.id == child.id for worker in pool.workers):  # a drained one is not
                pool.eject(child.id, "it was restarted")

        children = self._children(token, on_ready=count_up, on_restart=restarted)
        show(f"Starting {self.model}: 0 of {self.count} workers ready")
        async with children, pool, fleet:  # in this order: the pool must not see its workers die
            await children.ready()
            gpus = gpus_of_workers(self.placement, children.children)
            for child in children.children:
                admin = LockstepAdmin(child.system_url, token)
                await fleet.add(child.url, admin, worker_id=child.id, gpus=gpus[child.id])
            await pool.wait_ready(self.count, READY_SECONDS)
            yield [
                {
                    "id": process.id,
                    "url": process.url,
                    "system_url": process.system_url,
                    "pid": process.pid,
                    "gpus": gpus[process.id],
                }
                for process in children.children
            ]

    @asynccontextmanager
    async def started(self, token: str, show: ShowStatus) -> AsyncIterator[list[StartedWorker]]:
        """Run the workers while the block runs; restart those that end."""
        show(f"Starting {self.model}: {self.count} workers")
        children = self._children(token)
        async with children:
            await children.ready()
            gpus = gpus_of_workers(self.placement, children.children)
            yield [
                StartedWorker(child.id, child.url, child.system_url, child.pid, "lockstep",
                              gpus=gpus[child.id])
                for child in children.children
            ]  # fmt: skip

    def _children(self, token: str, **hooks: Any) -> Supervisor:
        from lockstep.launch.workers import embedded_workers

        return embedded_workers(
            self.model,
            self.count,
            admin_token=token,
            arguments=self.arguments,
            placement=self.placement,
            drain_seconds=self.drain_seconds,
            **hooks,
        )


def gpus_of_workers(
    placement: Placement | None, children: Sequence[Child]
) -> dict[str, tuple[str, ...]]:
    """Return the GPUs of each worker by its id; none where workers were not placed."""
    return {
        child.id: () if placement is None else placement.ids(index)
        for index, child in enumerate(children)
    }


@dataclass(frozen=True, slots=True)
class RunningWorkers:
    """Workers that run already."""

    urls: tuple[str, ...]
    worker_options: dict[str, Any]
    wait_seconds: float
    admin_token: str | None = None
    starts_workers = False

    async def identity(self) -> ModelIdentity:
        """The identity of the model that the first worker to respond serves."""
        urls = [url.partition(",")[0] for url in self.urls]
        options = dict(self.worker_options)
        options.pop("logprob_mode", None)
        return ModelIdentity.of_fleet(await served_model(urls, self.wait_seconds, options), urls)

    @asynccontextmanager
    async def joined(self, fleet: Fleet, token: str, show: ShowStatus) -> AsyncIterator[WorkerRows]:
        """Keep the workers in the fleet while the block runs; late workers join when they respond.

        URL,ADMIN_URL names a worker's admin port too, for which `admin_token` is used, or `token`:
        only then can its weights be updated from here.
        """
        token = self.admin_token or token
        pool = fleet.pool
        loop = asyncio.get_running_loop()
        show(f"Connecting to {', '.join(self.urls)}")
        deadline = loop.time() + self.wait_seconds
        async with pool, fleet:
            late: dict[str, str] = {}
            joining = [
                loop.create_task(self._take_in(fleet, url, token, late), name=url)
                for url in self.urls
            ]
            try:
                joined, waiting = await asyncio.wait(
                    joining, timeout=self.wait_seconds, return_when=asyncio.FIRST_EXCEPTION
                )
                for task in joined:
                    task.result()
                reasons = [late.get(name := task.get_name(), f"{name} is late") for task in waiting]
                try:
                    left = max(deadline - loop.time(), JOINED_SECONDS)
                    await pool.wait_ready(len(joined), left)
                except Unavailable as error:
                    reasons.append(error.message)
                if not any(worker.state == "serving" for worker in pool.workers):
                    raise Unavailable(
                        f"0 of {len(self.urls)} workers serve after {self.wait_seconds:g} s: "
                        f"{'; '.join(reasons)}"
                    )
                if reasons:
                    log.warning("serving without some of the workers: %s", "; ".join(reasons))
                for task in waiting:
                    task.add_done_callback(_report)
                yield [
                    {"id": member.id, "url": member.url, "system_url": None, "pid": None}
                    for member in pool.workers
                ]
            finally:
                for task in joining:
                    task.cancel()
                await asyncio.gather(*joining, return_exceptions=True)

    async def _take_in(self, fleet: Fleet, url: str, token: str, late: dict[str, str]) -> None:
        """Add a worker to the fleet once its admin port responds; until then, record the reason in
        `late`.
        """
        from lockstep.backends.registry import open_admin

        data_url, _, admin_url = url.partition(",")
        if not admin_url:
            await fleet.pool.add(data_url, **self.worker_options)
            return
        while True:
            try:
                admin = await open_admin(admin_url, token)
                break
            except Unavailable as error:
                if url not in late:
                    log.warning("worker %s joins once it responds: %s", data_url, error.message)
                late[url] = error.message
                await asyncio.sleep(LATE_SECONDS)
        late.pop(url, None)
        worker = await fleet.add(data_url, admin, **self.worker_options)
        fleet.membership.keep_token(worker.id, token)


def _report(task: asyncio.Task[None]) -> None:
    """Log why a late worker could not be added: no caller waits for it any more."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("worker %s is not added: %s", task.get_name(), error)


@dataclass(frozen=True, slots=True)
class JoiningWorkers:
    """Workers that register themselves at the admin port, once the gateway listens there."""

    model: str
    starts_workers = False

    async def identity(self) -> ModelIdentity:
        """Return the identity of the model whose tokenizer is used."""
        return ModelIdentity.of_files(self.model)

    @asynccontextmanager
    async def joined(self, fleet: Fleet, _: str, __: ShowStatus) -> AsyncIterator[WorkerRows]:
        """Run the fleet while the block runs; at first it has no workers."""
        async with fleet.pool, fleet:
            yield []


@dataclass(frozen=True, slots=True)
class StoredWorkers:
    """The workers that other gateways on the same store have added."""

    wait_seconds: float
    starts_workers = False

    async def identity(self) -> ModelIdentity:
        """Return a placeholder: no state is kept under it, because the state is in the store."""
        raise Unavailable("the workers of a store can be read only after the fleet has joined it")

    @asynccontextmanager
    async def joined(self, fleet: Fleet, _: str, show: ShowStatus) -> AsyncIterator[WorkerRows]:
        """Run the fleet while the block runs, which starts when the first worker serves here."""
        show("Looking for workers in the store")
        async with fleet.pool, fleet:
            await fleet.pool.wait_ready(1, self.wait_seconds)
            yield [
                {"id": worker.id, "url": worker.url, "system_url": None, "pid": None}
                for worker in fleet.pool.workers
            ]
