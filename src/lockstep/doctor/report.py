"""The row of this machine for the table of machines in docs/install.md."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from datetime import UTC, datetime

from lockstep.doctor.check import Check

COLUMNS = ("CPU", "Python", "torch", "GPU", "exact", "date")


def report_row(checks: Iterable[Check]) -> str:
    """Return a markdown table row, with the cells of `COLUMNS`, that a user can paste."""
    findings = {check.name: check.found.removesuffix(" (optional)") for check in checks}
    cells = (
        findings["CPU"],
        platform.python_version(),
        findings["torch"],
        findings.get("CUDA", "not checked"),
        findings.get("exact", "not checked"),
        str(datetime.now(UTC).date()),
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
