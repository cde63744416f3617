"""Exit codes of Lockstep's processes, by which a supervisor decides whether to restart one.

0   done, or stopped by SIGTERM or SIGINT
1   ran and failed: a fleet operation, a row of a check, a demo
2   the command or its input is wrong: it would fail again
75  temporarily unable to run, or lost what it needs (an engine, a lease, a server): restart it
130 a training run was stopped by SIGINT before its end

75 is EX_TEMPFAIL of sysexits.h. Python exits with 1 on a bug, the system with 128 + signal.
"""

from __future__ import annotations

import errno
from http import HTTPStatus
from typing import Final

from lockstep.tokens.errors import Busy, ContractError, LockstepError, RolloutFailed

OK: Final = 0
FAILED: Final = 1
WRONG: Final = 2
TRY_AGAIN: Final = 75
INTERRUPTED: Final = 130
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Disk errors that end when space is freed."""
DISK: Final = FULL | {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR}
"""System errors about a path that are not bugs."""


def exit_code(error: LockstepError) -> int:
    """Return the exit code of a process that ends with `error`.

    A caller's mistake is WRONG. So is a replaced gateway: restarted, it would take the workers
    back. A server that violates the contract, or an environment that raises, would do so again:
    FAILED.
    """
    if isinstance(error, (ContractError, RolloutFailed)):
        return FAILED
    if error.status < HTTPStatus.INTERNAL_SERVER_ERROR and not isinstance(error, Busy):
        return WRONG
    return TRY_AGAIN
