"""Which versions an answer may carry: those the fleet agreed on while it was being made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lockstep.tokens import Completion, VersionSpan
from lockstep.tokens.errors import Unavailable
from lockstep.tokens.versions import VersionLabel


class AcceptedVersions:
    """The versions in the order in which the fleet agreed on them.

    A worker that restarted with old weights answers under a label that was right once: only labels
    agreed on since the request began count. Before anything was agreed, everything counts.
    """

    def __init__(self) -> None:
        self._versions: list[str] = []

    @property
    def versions(self) -> tuple[str, ...]:
        return tuple(self._versions)

    @property
    def current(self) -> str | None:
        return self._versions[-1] if self._versions else None

    def add(self, version: str) -> None:
        self._versions.append(version)

    def mark(self) -> int:
        """A request begins now; to be given to `check` with its answer."""
        return max(len(self._versions) - 1, 0)

    def check(self, completions: Iterable[Completion], since: int, worker: str) -> None:
        """Raises Unavailable when an answer ends under a version that was not agreed on.

        Nothing was delivered yet, so the request may be tried on another worker.
        """
        for done in completions:
            self.check_spans(done.versions, since, worker)

    def check_spans(self, spans: Sequence[VersionSpan], since: int, worker: str) -> None:
        """`check` for one choice of which only the spans were read."""
        if not spans or since >= len(self._versions):
            return
        last = spans[-1].version
        if not self._agreed(last, since) and not self._agreed(
            VersionLabel.parse(last).weights, since
        ):
            raise Unavailable(
                f"worker {worker} answered under version {last!r}, but the fleet agreed on "
                f"{self._versions[-1]!r}: it must be brought up to date first"
            )

    def _agreed(self, version: str, since: int) -> bool:
        return version == self._versions[-1] or version in self._versions[since:]
