"""What this machine can do for Lockstep, asked of the machine and not guessed."""

from lockstep.doctor.check import Check, Status
from lockstep.doctor.examine import examine

__all__ = ["Check", "Status", "examine"]
