"""Report of a worker that compared the weights it computes with to the weights it was given."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lockstep.checkpoint.tensor_names import listed


class Difference(msgspec.Struct, frozen=True):
    """One element that a worker holds with another value than the checkpoint's."""

    name: str
    index: tuple[int, ...]
    held: float
    expected: float

    def __str__(self) -> str:
        place = ", ".join(map(str, self.index))
        return f"{self.name}[{place}] is {self.held:.6g}, expected {self.expected:.6g}"


class ReadBack(msgspec.Struct, frozen=True):
    """Comparison of the held weights with the tensors of a checkpoint or an adapter, by name.

    `tensors` maps a name to the number of elements compared and the number that differ; `first` is
    the first difference. `unread` maps names of tensors that could not be read back to the reason.
    `absent` names tensors that another rank holds. `sizes` are the numbers of elements of whole
    tensors, which all ranks together must have compared. With `whole_tensors`, they were compared
    by checksums: all elements of one that differs count as different, and none is shown.
    """

    tensors: dict[str, tuple[int, int]] = {}
    first: Difference | None = None
    unread: dict[str, str] = {}
    absent: tuple[str, ...] = ()
    sizes: dict[str, int] = {}
    seconds: float = 0.0
    whole_tensors: bool = False

    @property
    def elements(self) -> int:
        """Number of elements that were compared."""
        return sum(compared for compared, _ in self.tensors.values())

    @property
    def different(self) -> int:
        """Number of elements that differ."""
        return sum(different for _, different in self.tensors.values())

    @property
    def differing(self) -> list[str]:
        """Names of the tensors with at least one element that differs."""
        return [name for name, (_, different) in self.tensors.items() if different]

    @property
    def is_complete(self) -> bool:
        """Whether every tensor was compared."""
        return bool(self.tensors) and not self.unread

    def describe_difference(self) -> str:
        """Describe which tensors differ, and the first element.

        Example: "196608 of 417280 elements differ from the checkpoint, in 'a.weight', 'b.weight';
        the first: a.weight[0, 3] is 0.5, expected 0.25".
        """
        if self.whole_tensors:
            differing = self.differing
            return (
                f"{len(differing)} of {len(self.tensors)} tensors differ from the checkpoint by "
                f"their checksums: {listed(differing)}"
            )
        first = f"; the first: {self.first}" if self.first is not None else ""
        return (
            f"{self.different} of {self.elements} elements differ from the checkpoint, in "
            f"{listed(self.differing)}{first}"
        )

    def describe_unread(self) -> str:
        """Describe which tensors were not read back, and why the first of them was not."""
        reason = next(iter(self.unread.values()), "")
        return f"{listed(list(self.unread))} ({reason})"


def merge_ranks(reports: Sequence[ReadBack]) -> ReadBack:
    """Return one report of all ranks. A tensor of which the ranks together compared too few
    elements was not read back."""
    tensors: dict[str, tuple[int, int]] = {}
    unread: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for report in reports:
        unread |= report.unread
        sizes |= report.sizes
        for name, (compared, different) in report.tensors.items():
            before = tensors.get(name, (0, 0))
            tensors[name] = (before[0] + compared, before[1] + different)
    for name, size in sizes.items():
        compared, _ = tensors.get(name, (0, 0))
        if compared < size and name not in unread:
            unread[name] = f"{compared} of {size} elements read back"
    return ReadBack(
        tensors,
        next((report.first for report in reports if report.first is not None), None),
        unread,
        seconds=max((report.seconds for report in reports), default=0.0),
    )
