"""A row: one check of a server, the rules of the contract that it covers, and its finding."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from lockstep.check.target import Target

Verdict = Literal["pass", "fail", "n.a.", "error"]
Check = Callable[[Target], Awaitable[str]]
"""Returns the evidence of a pass; raises Broken or NotApplicable with that of another verdict."""


@dataclass(frozen=True, slots=True)
class CheckRow:
    """`law` names rules of the law and failure modes.

    L0 is its title, never silently wrong; L1 to L7 are its rules; F01 to F47 the failure modes.
    """

    id: str
    title: str
    law: str
    check: Check
    mutates: bool = False
    seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class Finding:
    """The finding of one row. `evidence` says what was sent, what came, and the numbers."""

    id: str
    title: str
    law: str
    verdict: Verdict
    evidence: str
    seconds: float


@dataclass(slots=True)
class RowGroup:
    """Rows about one subject; a module makes a group and adds its functions to it.

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
