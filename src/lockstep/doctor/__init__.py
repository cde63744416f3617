"""Checks of this machine: what it can do for Lockstep, and how to get the rest."""

from lockstep.doctor.check import Check, Status
from lockstep.doctor.examine import examine
from lockstep.doctor.report import report_row

__all__ = ["Check", "Status", "examine", "report_row"]
