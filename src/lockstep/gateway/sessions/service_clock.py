"""The service clock: seconds that gateways have served a session file, over their restarts."""

from __future__ import annotations

import time
from collections.abc import Callable


class ServiceClock:
    """Counts only while a gateway runs, so that neither a changed time of day nor a long night
    switched off makes sessions look unused."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._offset = 0.0

    def restore(self, seconds: float) -> None:
        """Goes on from where it was last saved."""
        self._offset = seconds - self._monotonic()

    def now(self) -> float:
        return self._monotonic() + self._offset
