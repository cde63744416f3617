"""What stored turns mean: their samples, and the tokenizer that alone can read their ids."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

from lockstep.ledger import Node
from lockstep.ledger.branch_sample import branch_sample
from lockstep.render import Renderer
from lockstep.tokens import Sample
from lockstep.tokens.errors import LockstepError, Unavailable


def samples_of(ends: Iterable[Node], train_aborted: bool) -> list[Sample]:
    """The sample of each branch, given the turns that end them."""
    return [branch_sample(end.path(), train_aborted=train_aborted) for end in ends]


def ends_of(turns: Iterable[tuple[Node, object]]) -> list[Node]:
    """The turns that end a branch, of a session that is not linked into a tree."""
    nodes = [node for node, _ in turns]
    inner = {node.parent.index for node in nodes if node.parent is not None}
    return [node for node in nodes if node.index not in inner]


@contextmanager
def whole(name: str) -> Iterator[None]:
    """Around reading stored turns: what is wrong with them is not the caller's doing."""
    try:
        yield
    except LockstepError as error:
        raise Unavailable(f"session {name!r} cannot be read back: {error.message}") from error


class Tokenizers:
    """Fingerprints of tokenizers, each made once, however many requests ask at the same time."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Any, bytes] = WeakKeyDictionary()
        self._making: dict[int, asyncio.Task[bytes]] = {}

    async def of(self, renderer: Renderer) -> bytes:
        """The fingerprint of its tokenizer: renderers that share one need not be told apart."""
        found = self._known.get(renderer.tokenizer)
        if found is None:
            key = id(renderer.tokenizer)
            task = self._making.get(key)
            if task is None:
                # A task of its own: the request that came first may go away.
                task = asyncio.create_task(self._make(renderer))
                self._making[key] = task
                task.add_done_callback(lambda _: self._making.pop(key))
            found = await asyncio.shield(task)
        return found

    async def _make(self, renderer: Renderer) -> bytes:
        made = await renderer.offload(_fingerprint, renderer.tokenizer)
        self._known[renderer.tokenizer] = made
        return made


def _fingerprint(tokenizer: Any) -> bytes:
    vocabulary = sorted(tokenizer.get_vocab().items())
    return blake2b(repr(vocabulary).encode(), digest_size=16).digest()
