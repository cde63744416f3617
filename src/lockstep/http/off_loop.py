"""Work that takes long is done by threads, so that the event loop stays free for others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
LARGE_BYTES = 256 << 10
"""JSON from which on going through it holds the loop for milliseconds."""
THREADS = 2
"""At once; the others wait, so that not all that is large is in memory decoded."""


async def off_loop(large: bool, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of `work`, which a thread does when there is much of it."""
    if not large:
        return work(*args, **kwargs)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_threads(), partial(work, *args, **kwargs))


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="lockstep-work")
