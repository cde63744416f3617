"""The engine: a step loop in its own thread, and an async API beside it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lockstep.engine.config import EngineOptions
from lockstep.engine.core import Core, PauseMode
from lockstep.engine.model.lora import Adapter
from lockstep.engine.numerics import mkl
from lockstep.engine.numerics.block_shapes import shared_products_hold
from lockstep.engine.sequence import EngineRequest, Event, RequestHandle, StreamedToken
from lockstep.engine.step_health import StepHealth
from lockstep.engine.weights.weights import Weights
from lockstep.models import bundled
from lockstep.tokens import Completion, LockstepError
from lockstep.tokens.errors import BadRequest, Conflict, EngineFailure, Unavailable
from lockstep.tokens.numerics import NumericsPlan
from lockstep.tokens.versions import check_adapter_name, check_label

log = logging.getLogger(__name__)
T = TypeVar("T")


class Engine:
    """Serves one model from one directory. All methods may be called from any asyncio loop.

    Use it as an async context manager, or call `start` and `close`.
    """

    def __init__(
        self,
        model: str | Path,
        options: EngineOptions | None = None,
        *,
        make_core: Callable[[Path, EngineOptions], Core] = Core,
    ) -> None:
        """`make_core` makes what takes the requests, where that is not the model itself."""
        self.options = options or EngineOptions()
        before = torch.get_num_threads()
        torch.set_num_threads(self.options.threads)
        try:
            self.core = make_core(bundled(str(model)) or Path(model), self.options)
        finally:
            torch.set_num_threads(before)
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._outbox: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        self._thread = threading.Thread(target=self._run, name="lockstep-engine", daemon=True)
        self._health = StepHealth(self.core)
        self._mutation = threading.Lock()
        self._staged: Weights | None = None

    async def __aenter__(self) -> Engine:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stops the loop; requests that are still here fail with Unavailable."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    @property
    def problem(self) -> str | None:
        """Why it cannot generate although it is alive; None while it can."""
        return self._health.problem

    def _check_works(self) -> None:
        if self.problem is not None:
            raise Unavailable(self.problem)

    # Generating

    async def generate(self, request: EngineRequest) -> list[Completion]:
        """All choices of a request. Raises a LockstepError; cancelling it stops the request."""
        async with self._submitted(request, stream=False) as events:
            event = await events.get()
            if isinstance(event, LockstepError):
                raise event
            if isinstance(event, StreamedToken):
                raise EngineFailure("a token was streamed for a request that is not streamed")
            return event

    async def stream(self, request: EngineRequest) -> AsyncIterator[StreamedToken]:
        """Tokens as they are sampled; the last event of each choice carries its completion."""
        async with self._submitted(request, stream=True) as events:
            left = request.sampling.n
            while left:
                event = await events.get()
                if isinstance(event, LockstepError):
                    raise event
                if not isinstance(event, StreamedToken):
                    raise EngineFailure("a streamed request got all completions at once")
                left -= event.completion is not None
                yield event

    async def check(self, request: EngineRequest) -> None:
        """Raises the error that `generate` would raise before it generates anything."""
        self._check_works()
        await self._prepare(request)
        await self._call(lambda: self.core.check(request))

    async def score_all(
        self, sequences: list[list[int]], *, adapter: str | None = None, staged: bool = False
    ) -> list[list[float]]:
        """Logprobs of every token after the first, all under the same live (or staged) weights.

        Works while paused, and does not disturb requests.
        """

        def run() -> list[list[float]]:
            weights = self._require_staged() if staged else None
            return self.core.score_all(sequences, adapter=adapter, weights=weights)

        return await self._call(run)

    async def abort(self, *request_ids: str) -> int:
        """Ends all requests of those ids, with the tokens they have; returns how many."""
        if not all(request_ids):
            raise BadRequest("request_id is empty: name the request to end", param="request_id")
        return await self._call(lambda: self.core.abort(*request_ids))

    # Control

    async def ping(self) -> None:
        """Returns when the engine's thread responds. Raises Unavailable when it is gone, or cannot
        generate any more."""
        self._check_works()
        await self._call(lambda: None)

    @property
    def busy(self) -> bool:
        """Whether any request is running or waiting."""
        return bool(self.core.handles)

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Returns when nothing is generated any more; new requests queue.

        `abort` ends requests with what they have, `wait` lets the running ones end, `keep` freezes
        them. Raises Conflict when a `wait` was overtaken by resume.
        """
        if mode not in ("abort", "wait", "keep"):
            raise BadRequest(f"mode is {mode!r}: expected abort, wait or keep", param="mode")
        quiet: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_quiet(error: LockstepError | None) -> None:
            self._reply(quiet, lambda: _settle(quiet, None, error))

        await self._call(lambda: self.core.pause(mode, on_quiet))
        await quiet

    async def resume(self) -> None:
        await self._call(self.core.resume)

    async def flush_cache(self) -> int:
        """Forgets all cached prefixes; returns how many blocks there were."""

        def flush() -> int:
            blocks = len(self.core.prefixes)
            self.core.prefixes.clear()
            return blocks

        return await self._call(flush)

    # Weights

    async def stage(self, directory: Path, version: str) -> Weights:
        """Loads a checkpoint beside the live weights, which go on serving.

        From here on the last commit cannot be rolled back any more: its memory is needed. Raises
        CheckpointError and keeps nothing when the checkpoint is not whole or does not fit.
        """
        check_label(version)
        with self._mutating("stage"):
            await self._call(self._forget_previous)
            self._staged = None
            self._staged = await asyncio.to_thread(
                self.core.served.load_weights, directory, version
            )
            return self._staged

    async def stage_tensors(self, tensors: Iterable[tuple[str, Tensor]], version: str) -> Weights:
        """Stages the live weights with some tensors replaced by name. Raises CheckpointError."""
        check_label(version)
        with self._mutating("stage"):
            live = await self._call(lambda: self.core.served.weights)
            self._staged = None
            self._staged = await asyncio.to_thread(live.updated, tensors, version)
            return self._staged

    async def commit(self) -> str:
        """Serves the staged weights from the next token on; returns the version.

        Requests in flight go on under them, with all keys and values computed anew.
        """
        with self._mutating("commit"):
            staged = self._require_staged()

            def swap() -> None:
                self.core.commit(staged)
                self._staged = None

            await self._call(swap)
            return staged.version

    async def rollback(self) -> str:
        """Drops what is staged, or else undoes the last commit; returns the version served then."""
        with self._mutating("rollback"):
            if self._staged is not None:
                self._staged = None
            else:
                await self._call(self.core.rollback)
            return self.core.served.weights.version

    @property
    def version(self) -> str:
        return self.core.served.weights.version

    @property
    def arithmetic(self) -> str:
        """ "exact", "portable" or "close": the option, or what this machine can do of it."""
        return self.core.plan.arithmetic

    @property
    def plan(self) -> NumericsPlan:
        """How this engine computes: what a trainer compares with its own plan."""
        return self.core.plan

    @property
    def max_model_len(self) -> int:
        return self.core.max_len

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        return self.core.served.adapters

    def version_of(self, adapter: Adapter | None) -> str:
        """The label that tokens sampled now under this adapter (or none) would carry."""
        return self.core.served.version_of(adapter)

    @property
    def staged_version(self) -> str | None:
        return None if self._staged is None else self._staged.version

    # Adapters

    async def load_adapter(self, name: str, path: Path, label: str | None = None) -> bool:
        """Serves an adapter under `name`; returns whether it replaced one.

        Raises AdapterError, and goes on serving the old one, when the new one is not sound.
        """
        check_adapter_name(name)
        if label is not None:
            check_label(label, "version")
        adapter = await asyncio.to_thread(self.core.served.load_adapter, name, path, label)
        return await self._call(lambda: self.core.served.add_adapter(adapter))

    async def unload_adapter(self, name: str) -> None:
        await self._call(lambda: self.core.served.remove_adapter(name))

    def stats(self) -> dict[str, Any]:
        """Counters and gauges; read without stopping the engine."""
        core = self.core
        return {
            "state": core.state,
            "running": len(core.scheduler.running),
            "waiting": len(core.handles) - len(core.scheduler.running),
            "steps": core.steps,
            "prompt_tokens": core.prompt_tokens,
            "generated_tokens": core.generated_tokens,
            "prefix_hit_tokens": core.prefixes.hits,
            "prefix_query_tokens": core.prefixes.queries,
            "prefix_blocks": len(core.prefixes),
            "slots": core.scheduler.slots,
            "slot_tokens": core.max_len,
            "version": core.served.weights.version,
            "staged": self.staged_version,
            "adapters": sorted(core.served.adapters),
            "arithmetic": core.plan.arithmetic,
            "arithmetic_note": core.arithmetic_note,
            "warm_note": core.warm_note,
            "numerics": core.plan.to_json(),
        }

    # The thread

    def _run(self) -> None:
        torch.set_num_threads(self.options.threads)
        # A setting of MKL for the calling thread: all products of the engine are made in this one.
        if self.plan.is_exact and not shared_products_hold(self.core.config.products):
            mkl.share_products(False)
        while True:
            with self._wake:
                while not self._commands and not self._stopping and not self.core.has_work:
                    if not self._wake.wait(self._health.wait_seconds):
                        break
                # Read together: every command that was taken before the stop is run.
                commands, stopping = list(self._commands), self._stopping
                self._commands.clear()
            for command in commands:
                command()
            if commands:
                # The caller of a pause or a resume does not wait for the step after it.
                self._flush()
            if stopping:
                self.core.fail_all(Unavailable("the engine is shutting down"))
                self._flush()
                return
            if self.core.has_work:
                try:
                    self.core.step()
                except Exception as error:
                    log.exception("a step failed")
                    self.core.fail_all(EngineFailure(f"a step failed: {error!r}"))
                    self._health.failed()
                else:
                    self._health.succeeded()
            self._health.try_again()
            self._flush()

    def _post(self, command: Callable[[], None]) -> bool:
        """Queues a command for the engine's thread; False when it stops and will not run it."""
        with self._wake:
            if self.alive:
                self._commands.append(command)
                self._wake.notify()
            return self.alive

    async def _call(self, run: Callable[[], T]) -> T:
        """The result of `run`, made in the engine's thread between two steps."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def command() -> None:
            try:
                result = run()
            except LockstepError as error:
                failure = error
                self._reply(future, lambda: _settle(future, None, failure))
            except Exception as error:
                log.exception("a command failed")
                failure = EngineFailure(f"a command failed: {error!r}")
                self._reply(future, lambda: _settle(future, None, failure))
            else:
                self._reply(future, lambda: _settle(future, result, None))

        if not self._post(command):
            raise Unavailable("the engine is not running")
        return await future

    def _reply(self, future: asyncio.Future[Any], callback: Callable[[], None]) -> None:
        self._outbox.setdefault(future.get_loop(), []).append(callback)

    def _flush(self) -> None:
        """Runs the callbacks in the event loops they belong to, with one wake-up for each loop."""
        outbox, self._outbox = self._outbox, {}
        for loop, callbacks in outbox.items():
            try:
                loop.call_soon_threadsafe(_run_all, callbacks)
            except RuntimeError:
                log.warning("%d results were lost: their event loop is closed", len(callbacks))

    @asynccontextmanager
    async def _submitted(
        self, request: EngineRequest, *, stream: bool
    ) -> AsyncIterator[asyncio.Queue[Event]]:
        """The events of a request, which is dropped when the block is left before it ended."""
        self._check_works()
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()

        def deliver(event: Event) -> None:
            self._outbox.setdefault(loop, []).append(lambda: events.put_nowait(event))

        handle = RequestHandle(request, deliver, stream=stream)
        await self._prepare(request)
        try:
            await self._call(lambda: self.core.submit(handle))
            yield events
        finally:
            # Also when the caller was cancelled while the request was on its way in.
            if not handle.ended:
                self._post(lambda: self.core.drop(handle))

    async def _prepare(self, request: EngineRequest) -> None:
        """Loads what the request needs beside the model, off the loop and beside running steps."""
        if request.sampling.stop:
            await asyncio.to_thread(self.core.vocabulary.load, "stop")
        if request.sampling.grammar is not None:
            await asyncio.to_thread(self.core.grammars.compile, request.sampling.grammar)

    def _mutating(self, operation: str) -> _Exclusive:
        return _Exclusive(self._mutation, operation)

    def _require_staged(self) -> Weights:
        if self._staged is None:
            raise Conflict("no weights are staged: call stage first")
        return self._staged

    def _forget_previous(self) -> None:
        self.core.served.previous = None


class _Exclusive:
    """Lets one change of weights run at a time; a second is refused, not queued."""

    def __init__(self, lock: threading.Lock, operation: str) -> None:
        self._lock, self._operation = lock, operation

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise Conflict(f"{self._operation} was refused: another change of weights is under way")

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _run_all(callbacks: Sequence[Callable[[], None]]) -> None:
    for callback in callbacks:
        callback()


def _settle(future: asyncio.Future[Any], result: Any, error: LockstepError | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
