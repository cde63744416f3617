"""Asks the rows one after the other: each bounded in time, none able to stop the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from fnmatch import fnmatch
from time import monotonic

from lockstep.check.outcome import Broken, NotApplicable
from lockstep.check.row import CheckRow, Finding, RowGroup, Verdict
from lockstep.check.rows import adapters as rows_adapters
from lockstep.check.rows import auth as rows_guard
from lockstep.check.rows import control as rows_control
from lockstep.check.rows import crowd as rows_crowd
from lockstep.check.rows import experts as rows_experts
from lockstep.check.rows import input as rows_input
from lockstep.check.rows import scores as rows_scores
from lockstep.check.rows import text as rows_text
from lockstep.check.rows import tokens as rows_tokens
from lockstep.check.rows import versions as rows_versions
from lockstep.check.rows import weights as rows_weights
from lockstep.check.target import Target
from lockstep.tokens.errors import (
    BadRequest,
    ContractError,
    DeadlineExceeded,
    LockstepError,
    UnsupportedField,
)

GROUPS: tuple[RowGroup, ...] = (
    rows_tokens.GROUP,
    rows_scores.GROUP,
    rows_versions.GROUP,
    rows_input.GROUP,
    rows_text.GROUP,
    rows_experts.GROUP,
    rows_control.GROUP,
    rows_weights.GROUP,
    rows_adapters.GROUP,
    rows_guard.GROUP,
    rows_crowd.GROUP,
)
"""In the order of the table. A new group is a module like these, and a line here. What a server
may die of comes last."""


def chosen_rows(patterns: Sequence[str] = (), *, mutate: bool = False) -> list[CheckRow]:
    """The rows to ask; `patterns` are of their ids. Raises BadRequest for one that fits none."""
    known = [row for group in GROUPS for row in group.rows]
    for pattern in patterns:
        if not any(fnmatch(row.id, pattern) for row in known):
            raise BadRequest(
                f"no row fits {pattern!r}; there are {', '.join(row.id for row in known)}",
                param="only",
            )
    return [
        row
        for row in known
        if (mutate or not row.mutates)
        and (not patterns or any(fnmatch(row.id, pattern) for pattern in patterns))
    ]


async def run_rows(target: Target, rows: Sequence[CheckRow]) -> AsyncIterator[Finding]:
    """What each row found, as it is found."""
    for row in rows:
        yield await run_row(target, row)


async def run_row(target: Target, row: CheckRow) -> Finding:
    began = monotonic()
    limit = row.seconds * target.subject.seconds / 60.0
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
        # A good request that was refused breaks the contract; a server in trouble is no answer.
        return "fail" if error.status < 500 else "error", f"{error.code}: {error.message}"
    except (LookupError, TypeError, ValueError, AttributeError, OSError) as error:
        # Answers of any shape end here: a row must not take the rest of the table with it.
        return "error", f"{type(error).__name__}: {error}"
