"""The conformance kit: asks any server whether it keeps the RL contract, row by row."""

from lockstep.check.report import Report
from lockstep.check.row import CheckRow, Finding, RowGroup, Verdict
from lockstep.check.run import chosen_rows, run_rows
from lockstep.check.target import Subject, Target, open_target

__all__ = [
    "CheckRow",
    "Finding",
    "Report",
    "RowGroup",
    "Subject",
    "Target",
    "Verdict",
    "chosen_rows",
    "open_target",
    "run_rows",
]
