"""Which versions an answer may carry: those the fleet agreed on while it was being made."""

from __future__ import annotations

from collections.abc import Iterable

from lockstep.tokens import Completion
from lockstep.tokens.errors import Unavailable


class Agreement:
    """The versions in the order in which the fleet agreed on them.

    A worker that restarted with old weights answers under a label that was right once: only labels
    agreed on since the request began count. Before anything was agreed, everything counts.
    """

    def __init__(self, versions: Iterable[str] = ()) -> None:
        self._versions = list(versions)

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
        allowed = self._versions[since:]
        if not allowed:
            return
        for done in completions:
            last = done.versions[-1].version.partition("+")[0] if done.versions else None
            if last is not None and last not in allowed:
                raise Unavailable(
                    f"worker {worker} answered under version {last!r}, but the fleet agreed on "
                    f"{allowed[-1]!r}: it must be brought up to date first"
                )
