"""Weight updates of a server that cannot stage: `commit` loads, `rollback` loads the last again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from lockstep.backends.admin import Source
from lockstep.tokens.errors import Conflict, LockstepError, UnsupportedField


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """Weights under a label; `source` is None when it is not known where they came from."""

    version: str | None
    source: Source | None


class ReloadedWeights:
    """The weights that were loaded into one server from here.

    `load` loads a source under a label while the server is paused; `ready` raises unless that is
    safe now. A load that failed leaves the server with weights that must not be served: it is
    `broken` until another load succeeds; errors in `untouched` say that it did not begin. This
    memory is the driver's: after a restart of its process, only what the server says is known.
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
        """The label of what is served; None when nobody knows, or when it is broken."""
        return None if self._live is None or self.broken is not None else self._live.version

    def observe(self, version: str | None, source: Source | None = None) -> None:
        """What the server itself says that it serves. Another label ends what was remembered,
        except after a failed load, when the label says nothing about the weights."""
        if self.broken is not None:
            return
        if self._live is None or (version is not None and version != self._live.version):
            self._live, self._previous = LoadedWeights(version, source), None

    def stage(self, source: Source, version: str) -> None:
        """Remembers the source. Raises UnsupportedField for shared memory."""
        if source.shared is not None:
            raise UnsupportedField(
                f"{self._url} cannot read weights from shared memory: give a directory",
                param="source",
            )
        self._pending = source, version

    async def commit(self, version: str) -> None:
        """Loads what is staged. Raises Conflict for another version, or when not paused."""
        if self._pending is None or self._pending[1] != version:
            raise Conflict(
                f"{self._url}: commit of {version!r} was requested, but {self.staged!r} is staged"
            )
        await self._ready()
        source, _ = self._pending
        await self._loading(source, version, self._live)
        self._previous, self._live, self._pending = self._live, LoadedWeights(version, source), None

    async def rollback(self) -> str | None:
        """Forgets what is staged, or loads the weights before the last commit (also one that
        failed). Raises Conflict when they are not known, or not to be had again."""
        if self._pending is not None and self.broken is None:
            self._pending = None
            return self.version
        # What is remembered as live after a failed load are the weights to go back to.
        back = self._previous if self.broken is None else self._live
        if back is None or back.version is None or back.source is None:
            raise Conflict(
                f"{self._url}: there is nothing to roll back to that could be loaded: stage and "
                "commit the version wanted"
            )
        if back.source.directory is None:
            raise Conflict(
                f"{self._url}: version {back.version!r} did not come from a directory, so it "
                "cannot be loaded again: stage and commit the version wanted"
            )
        await self._ready()
        await self._loading(back.source, back.version, back)
        self._live, self._previous, self._pending = back, None, None
        return back.version

    def check_whole(self) -> None:
        """Raises Conflict while the server holds half-loaded weights: serving would kill it."""
        if self.broken is not None:
            raise Conflict(
                f"{self._url} holds half-loaded weights ({self.broken}): roll back, or stage and "
                "commit a good version, before it is resumed"
            )

    async def _loading(self, source: Source, version: str, good: LoadedWeights | None) -> None:
        """Loads; when that fails, `good` is what the server has to go back to."""
        try:
            await self._load(source, version)
        except self._untouched:
            raise
        except BaseException as error:
            # Also when cancelled: the server may be in the midst of it.
            self.broken = f"loading {version!r} ended with {type(error).__name__}: {error}"
            self._live = good
            raise
        self.broken = None
