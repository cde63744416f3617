"""The engine's public API: async methods in front of a step loop that runs in its own thread."""

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

from lockstep.engine.core import Core
from lockstep.engine.model.lora import Adapter
from lockstep.engine.numerics import mkl
from lockstep.engine.numerics.block_shapes import shared_products_hold
from lockstep.engine.options import EngineOptions
from lockstep.engine.sequence import EngineRequest, Event, RequestHandle, StreamedToken
from lockstep.engine.step_health import StepHealth
from lockstep.engine.text.grammar_process import GrammarProcess
from lockstep.engine.text.grammar_shares import GrammarShares
from lockstep.engine.weights.weights import Weights
from lockstep.models import bundled
from lockstep.tokens import Completion, LockstepError
from lockstep.tokens.errors import BadRequest, Conflict, EngineFailure, Unavailable
from lockstep.tokens.numerics import NumericsPlan
from lockstep.tokens.operation import PauseMode
from lockstep.tokens.versions import check_adapter_name, check_label

log = logging.getLogger(__name__)
T = TypeVar("T")


class Engine:
    """An engine that serves one model from one directory.

        async with Engine("/models/qwen3", EngineOptions(max_seqs=16)) as engine:
            completions = await engine.generate(EngineRequest(prompt_ids=[1, 2, 3]))

    Without `async with`, call `start` and `close`. All methods may be called from any asyncio loop.
    """

    def __init__(
        self,
        model: str | Path,
        options: EngineOptions | None = None,
        *,
        make_core: Callable[[Path, EngineOptions], Core] = Core,
    ) -> None:
        """Load the model. `make_core` replaces the model, for example by a script of responses."""
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
        self._grammar_shares = GrammarShares()
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
        """Stop the step loop. Requests still in flight fail with Unavailable."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()
        self.core.grammars.close()
        self._grammar_shares.close()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    @property
    def problem(self) -> str | None:
        """Why a live engine cannot generate, or None while it can."""
        return self._health.problem

    def _check_healthy(self) -> None:
        if self.problem is not None:
            raise Unavailable(self.problem)

    # Generating

    async def generate(self, request: EngineRequest) -> list[Completion]:
        """Run a request and return all its choices.

        Raises a LockstepError. Cancelling the call stops the request.
        """
        async with self._submission(request, stream=False) as events:
            event = await events.get()
            if isinstance(event, LockstepError):
                raise event
            if isinstance(event, StreamedToken):
                raise EngineFailure("a token was streamed for a request that is not streamed")
            return event

    async def stream(self, request: EngineRequest) -> AsyncIterator[StreamedToken]:
        """Yield tokens as they are sampled. The last event of a choice carries its completion."""
        async with self._submission(request, stream=True) as events:
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
        """Raise the error that `generate` would raise before sampling the first token."""
        self._check_healthy()
        async with self._prepared(request):
            await self._call(lambda: self.core.check(request))

    async def score_all(
        self, sequences: list[list[int]], *, adapter: str | None = None, staged: bool = False
    ) -> list[list[float]]:
        """Return the logprobs of every token after the first, under the live (or staged) weights.

        All sequences are scored under the same weights. Works while paused and does not change
        requests in flight.
        """

        def run() -> list[list[float]]:
            weights = self._require_staged() if staged else None
            return self.core.score_all(sequences, adapter=adapter, weights=weights)

        return await self._call(run)

    async def abort(self, *request_ids: str) -> int:
        """Abort the requests with these ids; return how many there were.

        Each keeps the tokens sampled so far in its completion.
        """
        if not all(request_ids):
            raise BadRequest("request_id is empty: name the request to end", param="request_id")
        return await self._call(lambda: self.core.abort(*request_ids))

    # Control

    async def ping(self) -> None:
        """Return once the engine's thread responds.

        Raises Unavailable when the thread has stopped or cannot generate.
        """
        self._check_healthy()
        await self._call(lambda: None)

    @property
    def busy(self) -> bool:
        """Whether any request is running or waiting."""
        return bool(self.core.handles)

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Pause generation and return once no step runs. New requests are queued.

        Mode `abort` ends running requests with the tokens sampled so far, `wait` lets them finish,
        `keep` freezes them. Raises Conflict when `resume` is called before a `wait` has finished.
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
        """Drop all cached prefixes; return the number of blocks dropped."""

        def flush() -> int:
            blocks = len(self.core.prefixes)
            self.core.prefixes.clear()
            return blocks

        return await self._call(flush)

    # Weights

    async def stage(self, directory: Path, version: str) -> Weights:
        """Load a checkpoint next to the live weights while the engine keeps serving.

        The previous commit can no longer be rolled back, because its memory is reused. Raises
        CheckpointError, and stages nothing, when the checkpoint is incomplete or does not fit the
        model.
        """
        check_label(version)
        with self._mutating("stage"):
            # Release the previous and the staged weights first: memory holds two copies, not three.
            await self._call(self._forget_previous)
            self._staged = None
            self._staged = await asyncio.to_thread(
                self.core.served.load_weights, directory, version
            )
            return self._staged

    async def stage_tensors(self, tensors: Iterable[tuple[str, Tensor]], version: str) -> Weights:
        """Stage the live weights with the named tensors replaced. Raises CheckpointError."""
        check_label(version)
        with self._mutating("stage"):
            live = await self._call(lambda: self.core.served.weights)
            self._staged = None
            self._staged = await asyncio.to_thread(live.with_tensors, tensors, version)
            return self._staged

    async def commit(self) -> str:
        """Serve the staged weights from the next token on; return their version.

        Requests in flight continue under the new weights, and their keys and values are recomputed.
        """
        with self._mutating("commit"):
            staged = self._require_staged()

            def swap() -> None:
                self.core.commit(staged)
                self._staged = None

            # Run in the engine's thread, between two steps: no token is computed with tensors of
            # both versions, and every sampled token has exactly one version label.
            await self._call(swap)
            return staged.version

    async def rollback(self) -> str:
        """Drop the staged weights, or undo the last commit if none are staged.

        Returns the version served afterwards.
        """
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
        """The arithmetic in use: "exact", "portable" or "close", also if "auto" was requested."""
        return self.core.plan.arithmetic

    @property
    def plan(self) -> NumericsPlan:
        """How this engine computes, for comparison with a trainer's own plan."""
        return self.core.plan

    @property
    def max_model_len(self) -> int:
        return self.core.max_len

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        return self.core.served.adapters

    def version_of(self, adapter: Adapter | None) -> str:
        """Return the version label of a token sampled now with this adapter (or none)."""
        return self.core.served.version_of(adapter)

    @property
    def staged_version(self) -> str | None:
        return None if self._staged is None else self._staged.version

    # Adapters

    async def load_adapter(
        self,
        name: str,
        path: Path,
        label: str | None = None,
        roots: Sequence[Path] | None = None,
    ) -> bool:
        """Serve an adapter as `name`; return whether it replaced another.

        Raises AdapterError for an invalid adapter, and Forbidden for a symlink out of `roots` (None
        allows any); the engine then keeps serving the previous one.
        """
        check_adapter_name(name)
        if label is not None:
            check_label(label, "version")
        adapter = await asyncio.to_thread(self.core.served.load_adapter, name, path, label, roots)
        return await self._call(lambda: self.core.served.add_adapter(adapter))

    async def unload_adapter(self, name: str) -> None:
        await self._call(lambda: self.core.served.remove_adapter(name))

    def stats(self) -> dict[str, Any]:
        """Return counters and gauges, read without stopping the engine."""
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
        # MKL keeps this setting per thread, and this thread computes all products of the engine.
        if self.plan.is_exact and not shared_products_hold(self.core.config.products):
            mkl.share_products(False)
        while True:
            with self._wake:
                while not self._commands and not self._stopping and not self.core.has_work:
                    if not self._wake.wait(self._health.wait_seconds):
                        break
                # Read both under one lock, so that every command accepted before the stop runs.
                commands, stopping = list(self._commands), self._stopping
                self._commands.clear()
            for command in commands:
                command()
            if commands:
                # Answer a pause or a resume now, not after the next step.
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
                    self._health.record_failure()
                else:
                    self._health.record_success()
            self._health.retry_if_due()
            self._flush()

    def _post(self, command: Callable[[], None]) -> bool:
        """Queue a command for the engine's thread; return False when the engine is stopping."""
        with self._wake:
            if self.alive:
                self._commands.append(command)
                self._wake.notify()
            return self.alive

    async def _call(self, run: Callable[[], T]) -> T:
        """Run `run` in the engine's thread between two steps and return its result."""
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
        """Run the queued callbacks in their event loops."""
        # One call_soon_threadsafe per loop and step: each call is a system call that wakes it.
        outbox, self._outbox = self._outbox, {}
        for loop, callbacks in outbox.items():
            try:
                loop.call_soon_threadsafe(_run_all, callbacks)
            except RuntimeError:
                log.warning("%d results were lost: their event loop is closed", len(callbacks))

    @asynccontextmanager
    async def _submission(
        self, request: EngineRequest, *, stream: bool
    ) -> AsyncIterator[asyncio.Queue[Event]]:
        """Submit a request and yield the queue of its events.

        The request is dropped when the block exits before it has ended.
        """
        self._check_healthy()
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()

        def deliver(event: Event) -> None:
            self._outbox.setdefault(loop, []).append(lambda: events.put_nowait(event))

        handle = RequestHandle(request, deliver, stream=stream)
        async with self._prepared(request) as handle.grammar:
            try:
                await self._call(lambda: self.core.submit(handle))
                yield events
            finally:
                # Reached also when the caller is cancelled during submission: the drop is queued
                # behind the submit, so the request cannot stay in the engine without a caller.
                if not handle.ended:
                    self._post(lambda: self.core.drop(handle))

    @asynccontextmanager
    async def _prepared(self, request: EngineRequest) -> AsyncIterator[GrammarProcess | None]:
        """Load the tokenizer and grammar a request needs, in a thread, while steps keep running.

        Yields the process of its grammar, which is kept for the request until the block exits.
        """
        if request.sampling.stop:
            await asyncio.to_thread(self.core.vocabulary.load, "stop")
        grammar = request.sampling.grammar
        if grammar is None:
            yield None
            return
        async with self._grammar_shares.hold(request.tenant, grammar):
            yield await self._grammar_shares.compile(
                request.tenant,
                lambda: self.core.grammars.find(grammar),
                lambda: self.core.grammars.compile(grammar),
            )

    def _mutating(self, operation: str) -> _Exclusive:
        return _Exclusive(self._mutation, operation)

    def _require_staged(self) -> Weights:
        if self._staged is None:
            raise Conflict("no weights are staged: call stage first")
        return self._staged

    def _forget_previous(self) -> None:
        self.core.served.previous = None


class _Exclusive:
    """A lock for changes of weights that rejects a second one instead of queueing it."""

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
