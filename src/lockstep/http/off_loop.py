"""Policy for work that would block the event loop: thresholds of large work, and the thread pool.

Work of more than about a millisecond runs in a pool of threads, so that other requests continue.
Passing work to a thread costs 50 to 100 µs and, while the loop is busy, up to the 5 ms after which
the interpreter switches threads: smaller work runs on the loop. The thresholds below were measured
on one core of a server CPU; each names the work that takes a few milliseconds past it.

Calls that wait instead of computing (a file system, a download, another thread) use
`asyncio.to_thread`: its pool may fill up with waiting calls, and this one must not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import islice
from time import monotonic, sleep, thread_time
from typing import Any, ParamSpec, TypeVar

import msgspec

from lockstep.tokens import Completion

P = ParamSpec("P")
T = TypeVar("T")
THREADS = 4
"""Threads of the pool. The interpreter runs one of them at a time, so more would not be faster.
Several are needed so that a prompt of megabytes does not hold up short ones; a limit is needed so
that only so many large bodies are decoded in memory at once, while the others wait as bytes.
Tokenizers may be used by several threads at once: they need no pool of their own."""
LARGE_JSON_BYTES = 256 << 10
"""Bytes of JSON that is decoded, encoded or translated."""
SMALL_BODY_BYTES, LIGHT_BODY_BYTES, LIGHT_BODY_VALUES = 64 << 10, 1 << 20, 8192
"""A request body is decoded on the loop up to the first size, and up to the second one if it holds
no more values than this: long text decodes fast, many small objects do not."""
HUGE_BODY_ITEMS, REST = 16_384, 3
"""Comma-separated items of a body that is decoded by the paced thread, and for how many times its
CPU time that thread then rests: such bodies take at most a quarter of the interpreter's time."""
LARGE_RESPONSE_ENTRIES = 4096
"""Logprob entries (tokens and their alternatives) that a response writes."""
LONG_COMPLETION_TOKENS = 2000
"""Tokens of a completion that is parsed into a message."""
SHORT_CHAT_MESSAGES, SHORT_CHAT_CHARACTERS = 16, 4000
"""A conversation without tools that is rendered from its first message on."""
SHORT_EXTENSION_CHARACTERS = 2000
"""Text of the messages that a turn adds to a stored conversation, which alone is tokenized."""
LONG_HISTORY_MESSAGES, LARGE_HISTORY_BYTES = 1000, 128 << 10
"""Messages of a history that is compared with stored turns, and JSON in its calls and tools."""
TEXT_FIELDS = {"role", "content", "tool_call_id", "name"}
"""Fields of a message that are compared as text; others are decoded and encoded again."""


async def off_loop(large: bool, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the result of `work`, which runs in a thread if it is `large`."""
    if not large:
        return work(*args, **kwargs)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_threads(), partial(work, *args, **kwargs))


async def paced(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the result of `work`, which runs in the thread that takes its time between calls."""
    loop = asyncio.get_running_loop()
    pace = _pace()
    return await loop.run_in_executor(pace.thread, pace.run, partial(work, *args, **kwargs))


def is_large_json(size: int) -> bool:
    """Return whether JSON of this many bytes is large."""
    return size > LARGE_JSON_BYTES


def is_large_response(completions: Iterable[Completion], alternatives: int) -> bool:
    """Return whether writing these completions is large, each token with so many alternatives."""
    tokens = sum(
        len(completion.token_ids) + len(completion.prompt_logprobs or ())
        for completion in completions
    )
    return tokens * (1 + alternatives) > LARGE_RESPONSE_ENTRIES


def is_large_chat(messages: Sequence[dict[str, Any]], tools: object, texts: Iterable[str]) -> bool:
    """Return whether rendering a whole conversation is large; `texts` are those of its messages."""
    if tools or len(messages) > SHORT_CHAT_MESSAGES:
        return True
    if any(message.get("tool_calls") for message in messages):
        return True
    return sum(map(len, texts)) >= SHORT_CHAT_CHARACTERS


def is_large_history(
    messages: Iterable[Any], tools: Iterable[Any] | None, read_before: int = 0
) -> bool:
    """Return whether reading messages and tools is large; the first `read_before` messages were
    read with an earlier request."""
    if not isinstance(messages, list) or len(messages) > LONG_HISTORY_MESSAGES:
        return True
    size = _json_size(tools) if tools else 0
    for message in islice(messages, read_before, None):
        if isinstance(message, dict) and not message.keys() <= TEXT_FIELDS:
            size += _json_size({key: message[key] for key in message.keys() - TEXT_FIELDS})
    return size > LARGE_HISTORY_BYTES


def _json_size(value: object) -> int:
    try:
        return len(msgspec.json.encode(value))
    except (TypeError, ValueError, OverflowError, RecursionError):
        return 0  # an SDK's object, or a value that reading the message will reject by name


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="lockstep-work")


class Pace:
    """One thread for calls that hold the interpreter for milliseconds, such as decoding two million
    ids.

    After each call it rests for REST times the CPU time of the call. An engine takes the
    interpreter back after every operation, some fifty times in a step: beside calls that follow
    each other closely, each step of it would take fifty times as long as a call.
    """

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="lockstep-paced")
        self._rested = 0.0

    def run(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, once the rest after the call before is over."""
        sleep(max(0.0, self._rested - monotonic()))
        begun = thread_time()
        try:
            return work()
        finally:
            self._rested = monotonic() + REST * (thread_time() - begun)


@cache
def _pace() -> Pace:
    return Pace()
