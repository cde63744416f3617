"""Errors of stored turns, and fingerprints of the tokenizers of their ids."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

from lockstep.http.off_loop import off_loop
from lockstep.render import Renderer
from lockstep.tokens.errors import LockstepError, Unavailable


@contextmanager
def reading_back(name: str) -> Iterator[None]:
    """Raise Unavailable instead of errors in stored turns, which are not the caller's fault."""
    try:
        yield
    except LockstepError as error:
        raise Unavailable(f"session {name!r} cannot be read back: {error.message}") from error


class TokenizerFingerprints:
    """Fingerprints of tokenizers, each computed once for all requests that wait for it."""

    def __init__(self) -> None:
        self._fingerprints: WeakKeyDictionary[Any, bytes] = WeakKeyDictionary()
        self._tasks: dict[int, asyncio.Task[bytes]] = {}

    async def of(self, renderer: Renderer) -> bytes:
        """Return the fingerprint of the renderer's tokenizer."""
        fingerprint = self._fingerprints.get(renderer.tokenizer)
        if fingerprint is None:
            key = id(renderer.tokenizer)
            task = self._tasks.get(key)
            if task is None:
                # A task of its own: the request that started it may be cancelled.
                task = asyncio.create_task(self._make(renderer))
                self._tasks[key] = task
                task.add_done_callback(lambda _: self._tasks.pop(key))
            fingerprint = await asyncio.shield(task)
        return fingerprint

    async def _make(self, renderer: Renderer) -> bytes:
        fingerprint = await off_loop(True, _fingerprint, renderer.tokenizer)
        self._fingerprints[renderer.tokenizer] = fingerprint
        return fingerprint


def _fingerprint(tokenizer: Any) -> bytes:
    vocabulary = sorted(tokenizer.get_vocab().items())
    return blake2b(repr(vocabulary).encode(), digest_size=16).digest()
