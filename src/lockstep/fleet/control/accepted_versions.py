"""Which weight versions a completion may carry: those accepted while it was being made."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence

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
        self.read_anew: Callable[[], Awaitable[None]] | None = None
        """Accepts what the leader has accepted by now; None where this gateway decides itself."""

    def accept(self, version: str) -> None:
        """From now on the fleet serves this version."""
        self._versions.append(version)

    def follow(self, versions: Sequence[str]) -> None:
        """Accepts those that came after what is known; `versions` is the fleet's whole list."""
        known = self._versions[-1] if self._versions else None
        start = 0
        if known in versions:
            start = len(versions) - versions[::-1].index(known)
        self._versions.extend(versions[start:])

    def mark(self) -> int:
        """A request begins now; to be passed to `check` with its completions."""
        return max(len(self._versions) - 1, 0)

    def behind(self, mark: int) -> int:
        """How many versions were accepted since that mark."""
        return self.mark() - mark

    async def confirm(self, completions: Iterable[Completion], since: int, worker: str) -> None:
        """`check`, after a look at what the leader has accepted meanwhile where that is needed."""
        if self.read_anew is not None:
            completions = list(completions)
            for completion in completions:
                await self.learn(completion.versions, since)
        self.check(completions, since, worker)

    async def learn(self, spans: Sequence[VersionSpan], since: int) -> None:
        """Looks at what the leader has accepted, if these spans end under a version that is not
        known here: a worker serves it as soon as the leader has decided."""
        if self.read_anew is not None and not self._fits(spans, since):
            await self.read_anew()

    def check(self, completions: Iterable[Completion], since: int, worker: str) -> None:
        """Raises Unavailable when a completion ends under a version that was not accepted.

        Nothing was delivered yet, so the request may be tried on another worker.
        """
        for completion in completions:
            self.check_spans(completion.versions, since, worker)

    def check_spans(self, spans: Sequence[VersionSpan], since: int, worker: str) -> None:
        """`check` for one choice of which only the spans were read."""
        if not self._fits(spans, since):
            raise Unavailable(
                f"worker {worker} generated under version {spans[-1].version!r}, but the fleet "
                f"accepted {self._versions[-1]!r}: it must be brought up to date first"
            )

    def _fits(self, spans: Sequence[VersionSpan], since: int) -> bool:
        if not spans or since >= len(self._versions):
            return True
        last = spans[-1].version
        return self._is_accepted(last, since) or self._is_accepted(
            VersionLabel.parse(last).weights, since
        )

    def _is_accepted(self, version: str, since: int) -> bool:
        return version == self._versions[-1] or version in self._versions[since:]
