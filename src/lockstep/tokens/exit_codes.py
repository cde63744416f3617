"""The exit codes of Lockstep's processes, by which a supervisor knows whether to start one again.

0   it was done, or it was stopped by SIGTERM or SIGINT
1   it ran, and the result is no: an operation of the fleet failed, a row of a check, a demo
2   the command or what it was given is wrong: started again, it would end the same way
75  it cannot run now, or lost what it needs (an engine, a lease, a server): start it again
130 a run of training was stopped by SIGINT before its end

75 is EX_TEMPFAIL of sysexits.h. Python itself ends with 1 on a bug, the system with 128 + signal.
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
"""Errors of a disk that pass once somebody makes room."""
DISK: Final = FULL | {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR}
"""Errors of the system that say something about a path, and are no bug."""


def exit_code(error: LockstepError) -> int:
    """The code of a process that ends with `error`.

    What the caller did wrong is WRONG. So is a gateway that another one replaced: started again, it
    would take the workers back. A server that breaks the contract, or an environment that raises,
    does so again: FAILED.
    """
    if isinstance(error, (ContractError, RolloutFailed)):
        return FAILED
    if error.status < HTTPStatus.INTERNAL_SERVER_ERROR and not isinstance(error, Busy):
        return WRONG
    return TRY_AGAIN
