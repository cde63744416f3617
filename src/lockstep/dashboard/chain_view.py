"""The chain of a run as pages draw it: a mark for each step, and what the records say of it all."""

from __future__ import annotations

import json
from pathlib import Path

from lockstep.chain.records import Chain
from lockstep.run_record import AUDITS, Row
from lockstep.tokens.errors import LockstepError

SHORT = 16
"""Digits of a digest that are shown."""


def chain_view(directory: str | Path) -> Row | None:
    """Return the chain of a run and the marks of its audits; None for a run without a chain.

    An audit marks a step only while the record that it checked is still the record of that step.
    """
    try:
        chain = Chain.read(directory)
    except LockstepError:
        return None
    arithmetic = chain.start.get("arithmetic") or {}
    trainer = arithmetic.get("trainer") or {}
    audited = _audited(Path(directory))
    return {
        "records": len(chain.links),
        "head": chain.head[:SHORT],
        "breaks": list(chain.breaks),
        "fingerprint": str(trainer.get("fingerprint", "")),
        "mode": str(arithmetic.get("mode", "")),
        "key": str(chain.start.get("public_key") or "")[:SHORT],
        "steps": [
            {
                "step": link.step,
                "digest": link.digest[:SHORT],
                "mark": audited.get((link.step, link.digest), "recorded"),
            }
            for link in chain.links
            if link.kind == "step"
        ],
    }


def _audited(directory: Path) -> dict[tuple[int, str], str]:
    """Return the result of the newest audit of every record."""
    path = directory / AUDITS
    marks: dict[tuple[int, str], str] = {}
    for line in path.read_text("utf-8").splitlines() if path.is_file() else ():
        for own in json.loads(line)["steps"]:
            marks[own["step"], own["digest"]] = "audited" if own["held"] else "differs"
    return marks
