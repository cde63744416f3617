"""A row: one check of a server, the rules of the contract it covers, and its finding."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from lockstep.check.target import Target

Verdict = Literal["pass", "fail", "n.a.", "error"]
Check = Callable[[Target], Awaitable[str]]
"""Function that returns the evidence of a pass, or raises Broken or NotApplicable."""


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One check; `law` lists the design rules and failure modes it covers.

    L0 is "never silently wrong", L1 to L7 are the numbered rules, F01 and higher failure modes.
    """

    id: str
    title: str
    law: str
    check: Check
    mutates: bool = False
    seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one row. `evidence` says what was sent, what was received, and the numbers."""

    id: str
    title: str
    law: str
    verdict: Verdict
    evidence: str
    seconds: float


@dataclass(slots=True)
class RowGroup:
    """Rows about one subject; a module creates a group and adds its functions to it.

    `mutates` marks rows that change the server: they only run with --mutate.
    """

    name: str
    mutates: bool = False
    rows: list[CheckRow] = field(default_factory=list)

    def row(
        self, name: str, title: str, law: str, *, seconds: float = 60.0
    ) -> Callable[[Check], Check]:
        def add(check: Check) -> Check:
            made = CheckRow(f"{self.name}.{name}", title, law, check, self.mutates, seconds)
            self.rows.append(made)
            return check

        return add
