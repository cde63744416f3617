"""Renderers of a policy's tokenizer, loaded once, on first use, off the event loop."""

from __future__ import annotations

import asyncio
import functools
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lockstep.render import Renderer, Thinking


class TokenizerSource:
    """A tokenizer given by name, directory or object. Safe in any thread and on any loop.

    Concurrent callers share one load. After a failed load, the next call tries again.
    """

    def __init__(self, source: str | Path | Any) -> None:
        self._source = source
        self._loads: dict[Thinking, Future[Renderer]] = {}
        self._lock = threading.Lock()

    def get(self, thinking: Thinking) -> Renderer:
        """Return the renderer, blocking until it is loaded. Raises UnknownModel without a
        tokenizer.
        """
        return self._load(thinking).result()

    async def get_async(self, thinking: Thinking) -> Renderer:
        """Return the renderer without blocking the event loop; raise as `get` does."""
        load = self._load(thinking)
        if load.done():
            return load.result()
        # Shielded: cancelling one caller must not cancel the load that others wait for.
        return await asyncio.shield(asyncio.wrap_future(load))

    def _load(self, thinking: Thinking) -> Future[Renderer]:
        with self._lock:
            load = self._loads.get(thinking)
            if load is None or (load.done() and load.exception() is not None):
                load = self._loads[thinking] = _thread().submit(self._make, thinking)
            return load

    def _make(self, thinking: Thinking) -> Renderer:
        if isinstance(self._source, (str, Path)):
            return Renderer.load(self._source, thinking=thinking)
        return Renderer(self._source, thinking=thinking)


@functools.cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="lockstep-tokenizer")
