"""The renderers of a policy's tokenizer: loaded once, when first needed, off the event loop."""

from __future__ import annotations

import asyncio
import functools
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lockstep.render import Renderer, Thinking


class TokenizerSource:
    """A tokenizer by name, directory or as an object. Safe in any thread and on any loop.

    However many callers there are at once, it is loaded once. A load that failed is tried again by
    the next call.
    """

    def __init__(self, source: str | Path | Any) -> None:
        self._source = source
        self._loads: dict[Thinking, Future[Renderer]] = {}
        self._lock = threading.Lock()

    def get(self, thinking: Thinking) -> Renderer:
        """The renderer; waits for it. Raises UnknownModel when there is no such tokenizer."""
        return self._load(thinking).result()

    async def get_async(self, thinking: Thinking) -> Renderer:
        """`get`, with the event loop left free."""
        load = self._load(thinking)
        if load.done():
            return load.result()
        # Shielded: one that is cancelled must not cancel the load that others wait for.
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
