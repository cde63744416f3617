"""The conformance kit: asks any server whether it keeps the RL contract, row by row."""

from lockstep.check.report import Report
from lockstep.check.row import Finding, Group, Row, Verdict
from lockstep.check.run import ask_rows, chosen_rows
from lockstep.check.target import Subject, Target, open_target

__all__ = [
    "Finding",
    "Group",
    "Report",
    "Row",
    "Subject",
    "Target",
    "Verdict",
    "ask_rows",
    "chosen_rows",
    "open_target",
]
