"""Which weight versions a completion may carry: those accepted while it was being made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lockstep.tokens import Completion, VersionSpan
from lockstep.tokens.errors import Unavailable
from lockstep.tokens.versions import VersionLabel


class AcceptedVersions:
    """The versions in the order in which the fleet accepted them.

    A worker that restarted with old weights generates under a label that was right once: only
    labels accepted since the request began count. Before any was accepted, every label counts.
    """

    def __init__(self) -> None:
        self._versions: list[str] = []

    def accept(self, version: str) -> None:
        """From now on the fleet serves this version."""
        self._versions.append(version)

    def mark(self) -> int:
        """A request begins now; to be passed to `check` with its completions."""
        return max(len(self._versions) - 1, 0)

    def behind(self, mark: int) -> int:
        """How many versions were accepted since that mark."""
        return self.mark() - mark

    def check(self, completions: Iterable[Completion], since: int, worker: str) -> None:
        """Raises Unavailable when a completion ends under a version that was not accepted.

        Nothing was delivered yet, so the request may be tried on another worker.
        """
        for completion in completions:
            self.check_spans(completion.versions, since, worker)

    def check_spans(self, spans: Sequence[VersionSpan], since: int, worker: str) -> None:
        """`check` for one choice of which only the spans were read."""
        if not spans or since >= len(self._versions):
            return
        last = spans[-1].version
        if not self._is_accepted(last, since) and not self._is_accepted(
            VersionLabel.parse(last).weights, since
        ):
            raise Unavailable(
                f"worker {worker} generated under version {last!r}, but the fleet accepted "
                f"{self._versions[-1]!r}: it must be brought up to date first"
            )

    def _is_accepted(self, version: str, since: int) -> bool:
        return version == self._versions[-1] or version in self._versions[since:]
