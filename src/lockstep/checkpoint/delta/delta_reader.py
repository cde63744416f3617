"""Reader of deltas: tensors of the full checkpoint, changed link by link."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from lockstep.checkpoint.delta.chain import DeltaChain
from lockstep.checkpoint.delta.encoding import Patch, decode
from lockstep.checkpoint.delta.record import DELTA, DeltaLink, check_of
from lockstep.checkpoint.reader import CHUNK, Bytes, CheckpointReader, TensorShape
from lockstep.checkpoint.whole_reader import read_parts
from lockstep.tokens.errors import CheckpointError


class DeltaReader:
    """A `CheckpointReader` of the last link of a chain. Every result is checked."""

    def __init__(self, chain: DeltaChain) -> None:
        self.chain = chain
        self.link = chain.links[-1]
        self.directory = self.link.directory
        self.files: tuple[Path, ...] = (self.directory / DELTA, self.link.payloads)
        self.tensors: Mapping[str, TensorShape] = {
            name: delta.tensor for name, delta in self.link.record.tensors.items()
        }

    @property
    def anchor(self) -> CheckpointReader:
        return self.chain.anchor

    def where(self, name: str) -> str:
        return self.link.payloads.name

    def parts(self, name: str) -> Iterator[memoryview]:
        whole = self.array(name).data
        yield from (whole[at : at + CHUNK] for at in range(0, len(whole), CHUNK))

    def array(self, name: str) -> Bytes:
        """Return the bytes of a tensor. Raises CheckpointError that names the link whose result is
        not what was written."""
        links = self.chain.links
        # Everything before the last full payload is replaced by it.
        first = max(
            (at for at, link in enumerate(links) if link.record.tensors[name].encoding == "full"),
            default=0,
        )
        needed = links[first:]
        data = self.anchor.array(name)
        if any(link.record.tensors[name].encoding != "same" for link in needed):
            data = data.copy()
            for link in needed:
                apply_link(link, name, data)
        expected = self.link.record.tensors[name].check
        if check_of(data) != expected:
            raise self._first_wrong(name)
        return data

    def _first_wrong(self, name: str) -> CheckpointError:
        """Find the link after which the tensor is not what was written."""
        data = self.anchor.array(name).copy()
        wrong = self.link
        for link in self.chain.links:
            apply_link(link, name, data)
            if check_of(data) != link.record.tensors[name].check:
                wrong = link
                break
        return not_as_written(name, wrong)


def apply_link(link: DeltaLink, name: str, target: Bytes) -> Patch | None:
    """Change the bytes of a tensor in place as a link says, and return the patch if there is one.

    Raises CheckpointError that names tensor and link for a broken payload.
    """
    delta = link.record.tensors[name]
    if delta.encoding == "same":
        return None
    if target.nbytes != delta.tensor.nbytes:
        raise CheckpointError(
            f"tensor {name!r} has {target.nbytes} bytes, but link {link.directory.name!r} changes "
            f"one of {delta.tensor.nbytes}"
        )
    entry = link.entries[name]
    payload = np.empty(entry.end - entry.start, np.uint8)
    at = 0
    for part in read_parts(link.payloads, entry.start, entry.end):
        payload[at : at + len(part)] = np.frombuffer(part, np.uint8)
        at += len(part)
    try:
        patch = decode(payload.data, delta.tensor, delta.encoding, delta.changed, delta.gap_bytes)
    except CheckpointError as error:
        raise CheckpointError(
            f"the payload of tensor {name!r} in link {link.directory.name!r} ({link.payloads})"
            f" {error.message}: write the delta anew, or publish a full checkpoint"
        ) from None
    patch.apply(target)
    return patch


def not_as_written(name: str, link: DeltaLink) -> CheckpointError:
    """Return the error of a tensor whose bytes after a link are not those that were written."""
    return CheckpointError(
        f"tensor {name!r} is not what was written after link {link.directory.name!r} (version "
        f"{link.record.version!r}) is applied to {link.record.base.directory!r}: the delta or its "
        "base was changed since; publish a full checkpoint"
    )
