"""Weight updates of a server that cannot stage: `commit` loads, `rollback` loads the last again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from lockstep.backends.admin import Source
from lockstep.tokens.errors import Conflict, LockstepError, UnsupportedField


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """Weights under a label. `source` is None when their origin is not known."""

    version: str | None
    source: Source | None


class ReloadedWeights:
    """The weights that this driver loaded into one server.

    `load` loads a source under a label while the server is paused; `ready` raises unless that is
    safe now. A failed load leaves the server with weights that must not be served: it is `broken`
    until another load succeeds. Errors in `untouched` say that a load did not begin. This memory is
    the driver's: after a restart of its process, only what the server reports is known.
    """

    def __init__(
        self,
        url: str,
        load: Callable[[Source, str], Awaitable[None]],
        ready: Callable[[], Awaitable[None]],
        *,
        untouched: tuple[type[LockstepError], ...] = (),
    ) -> None:
        self._url = url
        self._load = load
        self._ready = ready
        self._untouched = untouched
        self._live: LoadedWeights | None = None
        self._previous: LoadedWeights | None = None
        self._pending: tuple[Source, str] | None = None
        self.broken: str | None = None

    @property
    def staged(self) -> str | None:
        return None if self._pending is None else self._pending[1]

    @property
    def version(self) -> str | None:
        """The label of the served weights; None when it is not known, or when the server is
        broken."""
        return None if self._live is None or self.broken is not None else self._live.version

    @property
    def source(self) -> Source | None:
        """The origin of the served weights; None as for `version`, or when it is not known."""
        return None if self._live is None or self.broken is not None else self._live.source

    def observe(self, version: str | None, source: Source | None = None) -> None:
        """Take over the label that the server reports.

        Another label than the last one ends what was remembered, except after a failed load, when
        the label says nothing about the weights.
        """
        if self.broken is not None:
            return
        if self._live is None or (version is not None and version != self._live.version):
            self._live, self._previous = LoadedWeights(version, source), None

    def forget(self) -> None:
        """Drop what is remembered: the server's process is another one now."""
        self._live = self._previous = self._pending = self.broken = None

    def stage(self, source: Source, version: str) -> None:
        """Store the source. Raises UnsupportedField for shared memory and object stores."""
        if source.shared is not None:
            raise UnsupportedField(
                f"{self._url} cannot read weights from shared memory: give a directory",
                param="source",
            )
        source.path(self._url)
        self._pending = source, version

    async def commit(self, version: str) -> None:
        """Load the staged source. Raises Conflict for another version, or when not paused."""
        if self._pending is None or self._pending[1] != version:
            raise Conflict(
                f"{self._url}: commit of {version!r} was requested, but {self.staged!r} is staged"
            )
        await self._ready()
        source, _ = self._pending
        await self._loading(source, version, self._live)
        self._previous, self._live, self._pending = self._live, LoadedWeights(version, source), None

    async def rollback(self) -> str | None:
        """Drop the staged source, or load the weights before the last commit (also a failed one).
        Raises Conflict when those weights are not known or cannot be loaded again."""
        # Nothing was loaded yet, so dropping the source is enough. After a failed load the server
        # holds half of it, whatever is pending, and must load the last weights again.
        if self._pending is not None and self.broken is None:
            self._pending = None
            return self.version
        # After a failed load, `_live` still names the weights before it.
        back = self._previous if self.broken is None else self._live
        if back is None or back.version is None or back.source is None:
            raise Conflict(
                f"{self._url}: there is nothing to roll back to that can be loaded: stage and "
                "commit the version you want"
            )
        if back.source.directory is None:
            raise Conflict(
                f"{self._url}: version {back.version!r} did not come from a directory, so it "
                "cannot be loaded again: stage and commit the version you want"
            )
        await self._ready()
        await self._loading(back.source, back.version, back)
        self._live, self._previous, self._pending = back, None, None
        return back.version

    def check_whole(self) -> None:
        """Raise Conflict while the server holds half-loaded weights: serving them would kill it."""
        if self.broken is not None:
            raise Conflict(
                f"{self._url} holds half-loaded weights ({self.broken}): roll back, or stage and "
                "commit a good version, before it is resumed"
            )

    async def _loading(self, source: Source, version: str, good: LoadedWeights | None) -> None:
        """Load a source. When that fails, `good` are the weights to roll back to."""
        try:
            await self._load(source, version)
        except self._untouched:
            raise
        except BaseException as error:
            # Also when cancelled: the server may have loaded a part.
            self.broken = f"loading {version!r} ended with {type(error).__name__}: {error}"
            self._live = good
            raise
        self.broken = None
