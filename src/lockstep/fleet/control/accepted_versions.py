"""The weight versions that a completion may carry: those accepted while it was generated."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence

from lockstep.tokens import Completion, VersionSpan
from lockstep.tokens.errors import Unavailable
from lockstep.tokens.versions import VersionLabel


class AcceptedVersions:
    """Weight versions in the order in which the fleet accepted them.

    A worker that restarted with old weights generates under a label that was valid once. So only
    labels accepted since the request began count. Before the first is accepted, every label counts.
    """

    def __init__(self) -> None:
        self._versions: list[str] = []
        self.read_anew: Callable[[], Awaitable[None]] | None = None
        """Reads the versions that the leader has accepted by now; None where this gateway leads."""

    def accept(self, version: str) -> None:
        """Accept a version: the fleet serves it from now on."""
        self._versions.append(version)

    def follow(self, versions: Sequence[str]) -> None:
        """Accept the versions that are new in `versions`, the fleet's whole list."""
        last = self._versions[-1] if self._versions else None
        start = 0
        if last in versions:
            start = len(versions) - versions[::-1].index(last)
        self._versions.extend(versions[start:])

    def mark(self) -> int:
        """Return the mark of a request that begins now, for `check` of its completions."""
        return max(len(self._versions) - 1, 0)

    def behind(self, mark: int) -> int:
        """Return how many versions were accepted since a mark."""
        return self.mark() - mark

    def throughout(self, mark: int) -> str | None:
        """Return the version that was accepted from a mark until now; None if there are several or
        none."""
        return self._versions[-1] if self._versions and not self.behind(mark) else None

    async def confirm(self, completions: Iterable[Completion], since: int, worker: str) -> None:
        """Run `check`, after reading the leader's versions if a completion's version is not known
        here."""
        if self.read_anew is not None:
            completions = list(completions)
            for completion in completions:
                await self.learn(completion.versions, since)
        self.check(completions, since, worker)

    async def learn(self, spans: Sequence[VersionSpan], since: int) -> None:
        """Read the leader's versions if these spans end under one that is not known here. A worker
        serves a new version as soon as the leader has decided, before followers hear of it."""
        if self.read_anew is not None and not self._fits(spans, since):
            await self.read_anew()

    def check(self, completions: Iterable[Completion], since: int, worker: str) -> None:
        """Raise Unavailable when a completion ends under a version that was not accepted. Nothing
        was delivered yet, so the request may be retried on another worker."""
        for completion in completions:
            self.check_spans(completion.versions, since, worker)

    def check_spans(self, spans: Sequence[VersionSpan], since: int, worker: str) -> None:
        """Run `check` for one choice of which only the spans were read."""
        if not self._fits(spans, since):
            raise Unavailable(
                f"worker {worker} generated under version {spans[-1].version!r}, but the fleet "
                f"accepted {self._versions[-1]!r}: it must be brought up to date first"
            )

    def _fits(self, spans: Sequence[VersionSpan], since: int) -> bool:
        if not spans or since >= len(self._versions):
            return True
        # Only the last span counts: after an update during the request, earlier spans are older.
        # A label may name an adapter as well; the fleet accepts versions of weights.
        last = spans[-1].version
        return self._is_accepted(last, since) or self._is_accepted(
            VersionLabel.parse(last).weights, since
        )

    def _is_accepted(self, version: str, since: int) -> bool:
        return version == self._versions[-1] or version in self._versions[since:]
