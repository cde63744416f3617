"""The weights of one vLLM rank: served, staged beside them, and the previous ones for a
rollback."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.backends.vllm.extension.source import TensorsRead, complete_tensors
from lockstep.protocol.control.worker import Stage
from lockstep.tokens.errors import BadRequest, Conflict, EngineFailure, LockstepError

INITIAL_VERSION = "default"
"""vLLM's label of the weights it was started with."""
Load = Callable[[Mapping[str, Any], Mapping[str, Any]], None]
"""Makes the model compute with the first; on failure raises, and it computes with the second."""


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """All tensors of a checkpoint, in memory. `version` is None where they have no label.

    `digests` are those of a checkpoint that was read as a whole.
    """

    tensors: Mapping[str, Any]
    version: str | None
    digests: Mapping[str, str] | None = None


class StagingThread:
    """Reads weights in a thread of its own, while generation continues."""

    def __init__(self, request: Stage, read: Callable[[], HeldWeights]) -> None:
        self.request = request
        self.held: HeldWeights | None = None
        self.error: LockstepError | None = None
        self._read = read
        self._thread = threading.Thread(target=self._run, name="lockstep-stage", daemon=True)
        self._thread.start()

    @property
    def under_way(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.held = self._read()
        except LockstepError as error:
            self.error = error
        except Exception as error:
            # A thread has no caller: the next call to `stage` raises it.
            self.error = EngineFailure(f"staging failed with {type(error).__name__}: {error}")


class RankWeights:
    """The weights of one rank: what is served, what is staged, and what was served before.

    `live` are the tensors that the model was loaded from, as the checkpoint names them.

    Not thread-safe: vLLM runs one call after the other.
    """

    def __init__(
        self,
        live: Mapping[str, Any],
        load: Load,
        read: Callable[[Stage], TensorsRead],
        *,
        tied: bool,
    ) -> None:
        self._live = HeldWeights(live, INITIAL_VERSION)
        self._previous: HeldWeights | None = None
        self._staging: StagingThread | None = None
        self._session: dict[str, Any] | None = None
        self._session_version: str | None = None
        self._load = load
        self._read = read
        self._tied = tied
        self._broken: str | None = None

    @property
    def version(self) -> str | None:
        return self._live.version

    @property
    def live_tensors(self) -> Mapping[str, Any]:
        """The tensors that the model is supposed to compute with, as the checkpoint names them."""
        return self._live.tensors

    @property
    def staged(self) -> str | None:
        held = None if self._staging is None else self._staging.held
        return None if held is None else held.version

    def digests(self, *, staged: bool) -> Mapping[str, str] | None:
        """Return the digests of the tensors that were read, by name; None where they are not known.
        Raises Conflict when nothing is staged."""
        if not staged:
            return self._live.digests
        held = None if self._staging is None else self._staging.held
        if held is None:
            raise Conflict("no weights are staged: call stage first")
        return held.digests

    def check_whole(self) -> None:
        """Raise EngineFailure when a load failed in a way that could not be undone."""
        if self._broken is not None:
            raise EngineFailure(self._broken)

    # The transaction

    def stage(self, request: Stage) -> str | None:
        """Start or continue to read; return the version once all is in memory, None until then.

        The caller repeats the call until then. Raises the error of reading once: the next call
        starts over.
        """
        version = request.weight_version or (
            Path(request.model_path).name if request.model_path else ""
        )
        if not version:
            raise BadRequest("weight_version is empty: the weights need a label",
                             param="weight_version")  # fmt: skip
        staging = self._staging
        if staging is not None and staging.under_way:
            if staging.request != request:
                raise Conflict(f"{staging.request.weight_version!r} is being staged: wait for it")
            return None
        if (
            staging is None
            or staging.request != request
            or (staging.held is None and staging.error is None)
        ):
            # A partial update is completed with the tensors served now, not with those served when
            # the thread gets to them.
            live = self._live.tensors
            self._staging = StagingThread(request, lambda: self._complete(request, live, version))
            return None
        if staging.error is not None:
            self._staging = None
            raise staging.error
        return version

    def commit(self, version: str) -> None:
        """Serve the staged weights. Raises Conflict unless they are of that version."""
        staging = self._staging
        if staging is None or staging.held is None or staging.held.version != version:
            raise Conflict(f"commit of {version!r} was requested, but {self.staged!r} is staged")
        self._swap(staging.held)
        self._staging = None

    def rollback(self, version: str | None, staged: str | None) -> None:
        """Drop the staged weights, or else undo the last commit.

        `version` and `staged` are as the caller read them. Raises Conflict when they have changed,
        or when there is nothing to go back to.
        """
        if (version, staged) != (self.version, self.staged):
            raise Conflict(
                f"rollback from {version!r} with {staged!r} staged was requested, but now "
                f"{self.version!r} is served and {self.staged!r} staged"
            )
        if self._staging is not None:
            self._staging = None
            return
        if self._previous is None or self._previous.version is None:
            raise Conflict(
                "there are no labelled weights to roll back to: stage and commit a version"
            )
        self._swap(self._previous)
        self._previous = None

    # vLLM's own routes: start, update any number of times, finish

    def begin(self) -> None:
        self._session, self._session_version = {}, None

    def add(self, request: Stage) -> None:
        """Read a part of an update. The model is unchanged until `finish`."""
        if self._session is None:
            raise Conflict("no weight update was started: POST /start_weight_update first")
        self._session |= self._read(request).tensors
        self._session_version = request.weight_version or self._session_version

    def finish(self, *, partial: bool) -> None:
        """Serve all that was added, in one step."""
        parts, self._session = self._session, None
        if parts is None:
            raise Conflict("no weight update was started: POST /start_weight_update first")
        whole = complete_tensors(parts, self._live.tensors, tied=self._tied, partial=partial)
        self._swap(HeldWeights(whole, self._session_version))

    def _complete(self, request: Stage, live: Mapping[str, Any], version: str) -> HeldWeights:
        read = self._read(request)
        whole = complete_tensors(read.tensors, live, tied=self._tied, partial=request.partial)
        return HeldWeights(whole, version, None if request.partial else read.digests)

    def _swap(self, new: HeldWeights) -> None:
        # `_load` restores `before` when it fails, so `_live` stays true on every error except
        # weights_lost. After that the rank holds no usable weights, and every call must say so.
        before = self._live
        try:
            self._load(new.tensors, before.tensors)
        except EngineFailure as error:
            if error.code == "weights_lost":
                self._broken = error.message
            raise
        self._live, self._previous, self._broken = new, before, None
