"""The chain of a delta: the full checkpoint it begins with, and every delta since then."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.checkpoint.delta.record import Base, DeltaLink, is_delta
from lockstep.checkpoint.digest import combined
from lockstep.checkpoint.full_checkpoint import open_full
from lockstep.checkpoint.manifest import MANIFEST, Manifest, check_stable, sha256_of
from lockstep.checkpoint.reader import CheckpointReader, TensorShape
from lockstep.checkpoint.sources import check_links, inside
from lockstep.tokens.errors import CheckpointError, Forbidden


@dataclass(frozen=True, slots=True)
class DeltaChain:
    """A full checkpoint, the anchor, and the deltas on it, oldest first."""

    anchor: CheckpointReader
    links: tuple[DeltaLink, ...]

    @property
    def directories(self) -> tuple[Path, ...]:
        """Every directory that is read, the anchor's first."""
        return self.anchor.directory, *(link.directory for link in self.links)


def resolve_chain(directory: Path) -> DeltaChain:
    """Return the chain of a delta, from headers alone.

    A base that is missing, broken or holds other weights is replaced by a full checkpoint beside it
    that holds the same weights, if there is one. Otherwise CheckpointError names the link.
    """
    links = [DeltaLink.read(directory)]
    while True:
        try:
            base = _open_base(links[-1])
        except CheckpointError as error:
            twin = _full_twin(links)
            if twin is None:
                raise _broken(directory, links[-1], error) from None
            base = twin
        if not isinstance(base, DeltaLink):
            links.reverse()
            _check_shapes(base, links)
            return DeltaChain(base, tuple(links))
        links.append(base)


def check_roots(chain: DeltaChain, roots: Sequence[Path]) -> None:
    """Raise Forbidden for a directory of the chain, or a file in one, outside the allowed roots."""
    for directory in chain.directories:
        if not inside(directory.resolve(), roots):
            raise Forbidden(
                f"{directory}, which {chain.links[-1].directory} is based on, is outside the "
                f"allowed roots ({', '.join(map(str, roots))}): move it or add a checkpoint root"
            )
        check_links(directory, [path.name for path in directory.iterdir()], roots)


def base_of(directory: Path) -> tuple[Base, int]:
    """Return the identity of a checkpoint as a base, and its depth (0 for a full one).

    Its digest is empty if its manifest lists no tensors. Raises CheckpointError unless it is
    stable and has a manifest.
    """
    manifest = Manifest.read(directory)
    check_stable(directory, manifest)
    if manifest is None:
        raise CheckpointError(f"{directory} has no {MANIFEST}: a delta needs a base that has one")
    digest = combined(manifest.tensors) if manifest.tensors else ""
    link = DeltaLink.read(directory) if is_delta(manifest) else None
    version = None if link is None else link.record.version
    base = Base(directory.name, version, digest, sha256_of(directory / MANIFEST))
    return base, 0 if link is None else link.record.depth


def _open_base(link: DeltaLink) -> DeltaLink | CheckpointReader:
    """Return the base of a link. Raises CheckpointError unless it is what the link says.

    Depths fall by one from link to link, so a cycle is an error and the search ends.
    """
    at = link.directory.parent / link.record.base.directory
    manifest = _check_base(link.record.base, at)
    if not is_delta(manifest):
        return open_full(at, manifest)
    base = DeltaLink.read(at)
    if base.record.depth != link.record.depth - 1:
        raise CheckpointError(
            f"{at} is delta {base.record.depth} since the last full checkpoint, expected "
            f"{link.record.depth - 1}: the chain is a cycle, or links were swapped"
        )
    return base


def _check_base(base: Base, directory: Path) -> Manifest:
    """Return the manifest of a base. Raises CheckpointError unless it holds what `base` says."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory} does not exist")
    manifest = Manifest.read(directory)
    check_stable(directory, manifest)
    if manifest is None:
        raise CheckpointError(f"{directory} has no {MANIFEST}")
    if manifest.tensors:
        digest = combined(manifest.tensors)
        if digest != base.digest:
            raise CheckpointError(
                f"{directory} holds weights {digest}, expected {base.digest}: it is not the base, "
                "or links were swapped"
            )
    elif sha256_of(directory / MANIFEST) != base.manifest:
        raise CheckpointError(f"{directory} is another checkpoint than the base was")
    return manifest


def _full_twin(links: list[DeltaLink]) -> CheckpointReader | None:
    """Return a full checkpoint beside the deltas that holds the weights of one's base.

    Links older than that one are dropped from the list; the oldest are tried first.
    """
    full: dict[str, tuple[Path, Manifest]] = {}
    for directory in sorted(links[0].directory.parent.iterdir()):
        with suppress(CheckpointError):
            manifest = Manifest.read(directory) if directory.is_dir() else None
            check_stable(directory, manifest)
            if manifest is not None and manifest.tensors and not is_delta(manifest):
                full[combined(manifest.tensors)] = directory, manifest
    for at in reversed(range(len(links))):
        if (twin := full.get(links[at].record.base.digest)) is not None:
            del links[at + 1 :]
            return open_full(*twin)
    return None


def _broken(directory: Path, link: DeltaLink, error: CheckpointError) -> CheckpointError:
    base = link.record.base
    named = f"version {base.version!r} in " if base.version else ""
    return CheckpointError(
        f"{directory} cannot be read: its link {link.directory.name!r} is based on {named}"
        f"{base.directory!r}, but {error.message}. No full checkpoint beside it holds the same "
        "weights: restore that directory, or publish a full checkpoint"
    )


def _check_shapes(anchor: CheckpointReader, links: Sequence[DeltaLink]) -> None:
    """Raise CheckpointError unless all links have the tensors of the anchor."""
    expected: dict[str, TensorShape] = dict(anchor.tensors)
    for link in links:
        for name in expected.keys() | link.record.tensors.keys():
            delta = link.record.tensors.get(name)
            if delta is None or delta.tensor != expected.get(name):
                is_now = "missing" if delta is None else str(delta.tensor)
                raise CheckpointError(
                    f"tensor {name!r} is {is_now} in link {link.directory.name!r}, but "
                    f"{expected.get(name, 'missing')} in {anchor.directory}: a delta changes "
                    "values, not shapes; publish a full checkpoint"
                )
