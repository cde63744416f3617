"""Detection of an engine that fails every step, as opposed to requests that no engine could run."""

from __future__ import annotations

import logging
from time import monotonic

from lockstep.engine.core import Core
from lockstep.engine.sequence import EngineRequest, Event, RequestHandle
from lockstep.tokens import LockstepError, Sampling
from lockstep.tokens.errors import EngineFailure

log = logging.getLogger(__name__)
FAILURES = 3
"""Consecutive failed steps before the canary runs."""
RETRY_SECONDS = 5.0
"""Seconds between canaries while the engine is broken."""
CANARY = EngineRequest(
    prompt_ids=[0],
    sampling=Sampling(max_tokens=1, temperature=0.0, ignore_eos=True),
    request_id="lockstep-canary",
    skip_prefix_cache=True,
)
CANARY_STEPS = 8


class StepHealth:
    """Failure counter of `core`. The engine's thread updates it; any thread may read `problem`.

    Three failed steps in a row need not be the engine's fault: the same bad request may have been
    sent three times. StepHealth then runs a canary, an internal request for one plain token. Only
    when that fails too does it set `problem`, and repeats the canary every 5 s until it succeeds.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._failures = 0
        self._last_try = 0.0
        self.problem: str | None = None

    @property
    def wait_seconds(self) -> float | None:
        """Seconds the engine may sleep until the next canary, or None without a limit."""
        return None if self.problem is None else RETRY_SECONDS

    def record_success(self) -> None:
        """Reset the count of failed steps."""
        self._failures = 0

    def record_failure(self) -> None:
        """Count a failed step, after which all requests were ended with an error."""
        self._failures += 1
        if self._failures >= FAILURES and self.problem is None:
            self._run_canary()

    def retry_if_due(self) -> None:
        """Run the canary of a broken engine when it is due."""
        if self.problem is not None and monotonic() - self._last_try >= RETRY_SECONDS:
            self._run_canary()

    def _run_canary(self) -> None:
        """Run the canary and set or clear `problem`."""
        self._last_try = monotonic()
        if self._core.state != "running":
            return  # a paused engine generates nothing, so a canary would never get its token
        cause = self._canary_error()
        if cause is not None:
            self.problem = (
                f"the last {self._failures} steps of the engine failed, and so did its own test "
                f"request ({cause}). It is retried every {RETRY_SECONDS:g} s; restart this worker "
                "if it does not recover"
            )
            log.error("%s", self.problem)
            return
        if self.problem is not None:
            log.warning("engine recovered: its test request got a token")
        self.problem, self._failures = None, 0

    def _canary_error(self) -> str | None:
        """Return why the canary failed, or None when it got its token."""
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
            return f"no token after {CANARY_STEPS} steps"
        (event,) = events
        return event.message if isinstance(event, LockstepError) else None
