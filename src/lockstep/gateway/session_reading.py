"""What stored turns mean: their samples, and the tokenizer that alone can read their ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from weakref import WeakKeyDictionary

from lockstep.render import Node, Renderer
from lockstep.render.branches import branch_sample
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
    """Fingerprints of tokenizers, each made once."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Renderer, bytes] = WeakKeyDictionary()

    async def of(self, renderer: Renderer) -> bytes:
        found = self._known.get(renderer)
        if found is None:
            found = await renderer.offload(_fingerprint, renderer)
            self._known[renderer] = found
        return found


def _fingerprint(renderer: Renderer) -> bytes:
    vocabulary = sorted(renderer.tokenizer.get_vocab().items())
    return blake2b(repr(vocabulary).encode(), digest_size=16).digest()
