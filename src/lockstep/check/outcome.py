"""How a row ends when it does not pass: the contract is broken, or the row does not apply."""

from __future__ import annotations


class Broken(Exception):
    """The server broke the contract; the text is the evidence."""


class NotApplicable(Exception):
    """The row makes no sense for this server; the text says why."""


def require(kept: bool, evidence: str) -> None:
    """Raises Broken with the evidence unless the contract was kept."""
    if not kept:
        raise Broken(evidence)
