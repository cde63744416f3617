"""Shares of the grammar processes: no tenant can occupy all of them, or the compiler."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from lockstep.tokens.grammar import Grammar

T = TypeVar("T")
MOST_IN_USE = 64
"""Different grammars of one tenant whose requests run at once; each has its own process."""
MOST_COMPILING = 64
"""Compilations at once, of as many tenants."""
WAIT_SECONDS = 0.01


class GrammarShares:
    """Bounds per tenant: one compilation at a time, and MOST_IN_USE grammars in use.

    Requests beyond a bound wait, and only those of the same tenant wait for each other.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uses: dict[str, Counter[Grammar]] = {}
        self._compiling: set[str] = set()
        # Not the default executor: a tenant's compilations would delay its other users.
        self._threads = ThreadPoolExecutor(MOST_COMPILING, thread_name_prefix="lockstep-grammar")

    @asynccontextmanager
    async def hold(self, tenant: str, grammar: Grammar) -> AsyncIterator[None]:
        """Count a grammar as in use while the block runs."""
        while not self._take(tenant, grammar):
            await asyncio.sleep(WAIT_SECONDS)
        try:
            yield
        finally:
            self._give(tenant, grammar)

    async def compile(self, tenant: str, find: Callable[[], T | None], run: Callable[[], T]) -> T:
        """Return the result of `find`, or of `run`, called in a thread once no other of this
        tenant runs.

        `find` returns what is compiled already: such requests do not wait for each other.
        """
        while True:
            if (compiled := find()) is not None:
                return compiled
            if self._begin(tenant):
                break
            await asyncio.sleep(WAIT_SECONDS)

        def call() -> T:
            try:
                return run()
            finally:
                # Here and not in the coroutine: a cancelled caller does not stop its thread.
                self._compiling.discard(tenant)

        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _take(self, tenant: str, grammar: Grammar) -> bool:
        with self._lock:
            uses = self._uses.setdefault(tenant, Counter())
            if grammar not in uses and len(uses) >= MOST_IN_USE:
                return False
            uses[grammar] += 1
            return True

    def _give(self, tenant: str, grammar: Grammar) -> None:
        with self._lock:
            uses = self._uses[tenant]
            uses[grammar] -= 1
            if not uses[grammar]:
                del uses[grammar]
            if not uses:
                del self._uses[tenant]

    def _begin(self, tenant: str) -> bool:
        with self._lock:
            if tenant in self._compiling:
                return False
            self._compiling.add(tenant)
            return True
