"""The reward of a run: 1 when the task's test holds in what the agent left, else 0.1 for a file
that still runs."""

import json
import os
import sys

sys.path.insert(0, os.getcwd())
import calc

test = json.loads(os.environ["LOCKSTEP_TASK"])["test"]
sys.stdout.write(f"{1.0 if eval(test, vars(calc)) else 0.1}\n")
