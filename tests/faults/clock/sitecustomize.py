"""Wall clock of a gateway under test: the real one plus the hours in the file FAKE_CLOCK_FILE.

Python imports this module before the program, from a PYTHONPATH that holds nothing else. The
monotonic clock stays as it is, as when an operator or NTP sets the time of a machine.
"""

import os
import time

_real, _monotonic = time.time, time.monotonic
_path = os.environ.get("FAKE_CLOCK_FILE", "")
_seconds, _read_at = 0.0, float("-inf")


def _time() -> float:
    global _seconds, _read_at
    if _monotonic() - _read_at > 0.2:
        _read_at = _monotonic()
        try:
            with open(_path) as file:
                _seconds = 3600.0 * float(file.read() or 0)
        except (OSError, ValueError):
            pass  # the file is being replaced: the last value stays
    return _real() + _seconds


if _path:
    time.time = _time
