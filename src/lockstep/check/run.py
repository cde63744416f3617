"""Runner of the rows, one after the other: each bounded in time and isolated from the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from fnmatch import fnmatch
from time import monotonic

from lockstep.check.outcome import Broken, NotApplicable
from lockstep.check.row import CheckRow, Finding, RowGroup, Verdict
from lockstep.check.rows import (
    adapters,
    agents,
    auth,
    clients,
    control,
    crowd,
    experts,
    scores,
    text,
    tokens,
    versions,
    weights,
)
from lockstep.check.rows import input as input_rows
from lockstep.check.target import Target
from lockstep.tokens.errors import (
    BadRequest,
    ContractError,
    DeadlineExceeded,
    LockstepError,
    UnsupportedField,
)

GROUPS: tuple[RowGroup, ...] = tuple(
    module.GROUP
    for module in (
        tokens, scores, versions, input_rows, text, clients, agents, experts, control, weights,
        adapters, auth, crowd,
    )
)  # fmt: skip
"""Groups in the order of the table. A new group is a module like these and a line here. Rows that
may kill a server come last.
"""


def chosen_rows(patterns: Sequence[str] = (), *, mutate: bool = False) -> list[CheckRow]:
    """Return the rows whose ids match `patterns`. Raises BadRequest for a pattern without a
    match.
    """
    rows = [row for group in GROUPS for row in group.rows]
    for pattern in patterns:
        if not any(fnmatch(row.id, pattern) for row in rows):
            raise BadRequest(
                f"no row fits {pattern!r}; there are {', '.join(row.id for row in rows)}",
                param="only",
            )
    return [
        row
        for row in rows
        if (mutate or not row.mutates)
        and (not patterns or any(fnmatch(row.id, pattern) for pattern in patterns))
    ]


async def run_rows(target: Target, rows: Sequence[CheckRow]) -> AsyncIterator[Finding]:
    """Yield the finding of each row as it completes."""
    for row in rows:
        yield await run_row(target, row)


async def run_row(target: Target, row: CheckRow) -> Finding:
    began = monotonic()
    limit = row.seconds * target.options.seconds / 60.0
    try:
        async with asyncio.timeout(limit):
            verdict, evidence = await _judge(target, row)
    except TimeoutError:
        verdict, evidence = "error", f"not answered within {limit:g} s"
    took = monotonic() - began
    return Finding(row.id, row.title, row.law, verdict, evidence, round(took, 3))


async def _judge(target: Target, row: CheckRow) -> tuple[Verdict, str]:
    try:
        return "pass", await row.check(target)
    except Broken as broken:
        return "fail", str(broken)
    except (NotApplicable, UnsupportedField) as reason:
        return "n.a.", str(reason)
    except ContractError as error:
        return "fail", f"{error.code}: {error.message}"
    except DeadlineExceeded as error:
        return "error", error.message
    except LockstepError as error:
        # Rejecting a good request breaks the contract; a failing server proves nothing.
        return "fail" if error.status < 500 else "error", f"{error.code}: {error.message}"
    except (LookupError, TypeError, ValueError, AttributeError, OSError) as error:
        # Responses of any shape end here: one row must not prevent the rest of the table.
        return "error", f"{type(error).__name__}: {error}"
