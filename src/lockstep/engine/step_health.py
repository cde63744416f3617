"""Tells a broken engine from one whose requests would break any engine."""

from __future__ import annotations

import logging
from time import monotonic

from lockstep.engine.core import Core
from lockstep.engine.sequence import EngineRequest, Event, RequestHandle
from lockstep.tokens import LockstepError, Sampling
from lockstep.tokens.errors import EngineFailure

log = logging.getLogger(__name__)
FAILURES = 3
"""Steps that fail in a row before the engine itself is suspected."""
RETRY_SECONDS = 5.0
"""How often a broken engine tries whether it works again."""
CANARY = EngineRequest(
    prompt_ids=[0],
    sampling=Sampling(max_tokens=1, temperature=0.0, ignore_eos=True),
    request_id="lockstep-canary",
    skip_prefix_cache=True,
)
CANARY_STEPS = 8


class StepHealth:
    """Counts failed steps of `core`; lives in the engine's thread, `problem` is read from any.

    Three in a row need not be the engine's fault: the same bad request may have come three times.
    So it then runs a canary, a request of its own for one plain token; only when that fails too,
    `problem` says what is wrong, and the canary runs again every few seconds until it succeeds.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._failures = 0
        self._tried = 0.0
        self.problem: str | None = None

    @property
    def wait_seconds(self) -> float | None:
        """How long the engine may sleep until the next canary; None is for ever."""
        return None if self.problem is None else RETRY_SECONDS

    def succeeded(self) -> None:
        self._failures = 0

    def failed(self) -> None:
        """A step failed, and every request of the engine was ended with an error."""
        self._failures += 1
        if self._failures >= FAILURES and self.problem is None:
            self._try()

    def try_again(self) -> None:
        """Runs the canary of a broken engine, where it is time to."""
        if self.problem is not None and monotonic() - self._tried >= RETRY_SECONDS:
            self._try()

    def _try(self) -> None:
        self._tried = monotonic()
        if self._core.state != "running":
            return  # a paused engine generates nothing, so a canary could not tell
        cause = self._canary()
        if cause is not None:
            self.problem = (
                f"the last {self._failures} steps of the engine failed, and so did one of its own "
                f"({cause}): it is tried again every {RETRY_SECONDS:g} s; restart this worker if "
                "that does not help"
            )
            log.error("%s", self.problem)
            return
        if self.problem is not None:
            log.warning("the engine works again")
        self.problem, self._failures = None, 0

    def _canary(self) -> str | None:
        """Why the canary failed; None when it got its token."""
        events: list[Event] = []
        try:
            self._core.submit(RequestHandle(CANARY, events.append))
            for _ in range(CANARY_STEPS):
                self._core.step()
                if events:
                    break
        except Exception as error:
            self._core.fail_all(EngineFailure(f"a step failed: {error!r}"))
            return repr(error)
        if not events:
            return f"it had no token after {CANARY_STEPS} steps"
        (event,) = events
        return event.message if isinstance(event, LockstepError) else None
