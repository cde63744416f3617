"""`python -m lockstep.cli.parent_death PARENT ...`: the lockstep command, killed with its parent.

A gateway that is killed cannot stop its workers. So every worker asks the system to kill it when
its gateway ends, which also works for a worker that hangs.
"""

from __future__ import annotations

import sys

from lockstep.launch.parent_watch import exit_with_parent

if __name__ == "__main__":
    exit_with_parent(int(sys.argv.pop(1)))
    from lockstep.cli import main

    main()
