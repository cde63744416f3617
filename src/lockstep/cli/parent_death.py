"""`python -m lockstep.cli.parent_death PARENT ...`: the lockstep command, ending with its parent.

A gateway that is killed cannot stop its workers. So each asks the system to be killed with it,
which also holds for a worker that hangs.
"""

from __future__ import annotations

import sys

from lockstep.launch.parent_death import hold

if __name__ == "__main__":
    hold(int(sys.argv.pop(1)))
    from lockstep.cli import main

    main()
