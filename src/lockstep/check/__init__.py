"""Conformance kit: tests, row by row, whether a server keeps the contract of RL training."""

from lockstep.check.report import Report
from lockstep.check.row import CheckRow, Finding, RowGroup, Verdict
from lockstep.check.run import chosen_rows, run_rows
from lockstep.check.target import CheckOptions, Target, open_target

__all__ = [
    "CheckOptions",
    "CheckRow",
    "Finding",
    "Report",
    "RowGroup",
    "Target",
    "Verdict",
    "chosen_rows",
    "open_target",
    "run_rows",
]
