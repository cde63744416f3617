"""Digests of the gradients, optimizer state and weights that a step leaves behind."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import Tensor

from lockstep.checkpoint.digest import combined
from lockstep.checkpoint.manifest import Manifest
from lockstep.engine.weights.digest import Digester

Digests = dict[str, dict[str, str]]
"""Digests of tensors, by kind and name."""


class TensorDigests:
    """Hashes tensors in threads of their own, while the block saves them.

    The tensors must not change within the block.
    """

    def __init__(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._tensors = tensors
        self._threads = ExitStack()
        self._kinds: dict[str, Digester] = {}

    def __enter__(self) -> Self:
        for kind in ("gradients", "optimizer"):
            self._hash(kind)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._threads.__exit__(kind, error, trace)

    def collect(self, checkpoint: Path) -> Digests:
        """Return all digests. Those of the weights are the checkpoint's own, if its manifest has
        any; an adapter's has none.
        """
        manifest = Manifest.read(checkpoint)
        digests: Digests = {}
        if manifest is not None and manifest.tensors:
            digests["weights"] = dict(manifest.tensors)
        else:
            self._hash("weights")
        return digests | {kind: own.digests() for kind, own in self._kinds.items()}

    def _hash(self, kind: str) -> None:
        digester = self._threads.enter_context(Digester())
        self._kinds[kind] = digester
        for name, tensor in self._tensors[kind].items():
            digester.add(name, tensor)


def digest_tensors(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the digest of every tensor, by name."""
    with Digester() as digester:
        for name, tensor in tensors.items():
            digester.add(name, tensor)
        return digester.digests()


def combine(digests: Digests) -> dict[str, str]:
    """Return one digest for each kind of tensor."""
    return {kind: combined(tensors) for kind, tensors in digests.items()}
