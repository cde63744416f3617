"""Limits on the number and size of sessions, and the counts that the metrics show."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from lockstep.ledger.matching import EXPLAINED
from lockstep.tokens.errors import Busy, TooLarge

COUNTED = ("turns", "opened", "loaded", "expired", "deleted", "unwritten")
REFUSALS = ("sessions", "total_bytes", "turns", "bytes")


@dataclass(slots=True)
class SessionCounts:
    """Counts of what happened to sessions since the start, for the metrics."""

    turns: int = 0
    opened: int = 0
    loaded: int = 0
    expired: int = 0
    deleted: int = 0
    unwritten: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    breaks: Counter[str] = field(default_factory=Counter)

    def numbers(self) -> dict[str, int]:
        return {
            **{name: getattr(self, name) for name in COUNTED},
            **{f"refused_{name}": self.refused[name] for name in REFUSALS},
            **{f"breaks_{cause}": self.breaks[cause] for cause in EXPLAINED},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Limits of one session (TooLarge past them) and of all together (Busy past them)."""

    sessions: int
    turns: int
    bytes_per_session: int
    bytes_total: int

    def check_session(self, name: str, turns: int, nbytes: int, counts: SessionCounts) -> None:
        for what, value, limit in (
            ("turns", turns, self.turns),
            ("bytes", nbytes, self.bytes_per_session),
        ):
            if value >= limit:
                counts.refused[what] += 1
                raise TooLarge(
                    f"session {name!r} has {value} {what}, the limit is {limit}: read its "
                    "samples and go on in another session"
                )

    def check_all(self, sessions: int, nbytes: int, counts: SessionCounts) -> None:
        """Raises Busy when there may not be one more session, or turn."""
        for what, value, limit in (
            ("sessions", sessions, self.sessions),
            ("total_bytes", nbytes, self.bytes_total),
        ):
            if value >= limit:
                counts.refused[what] += 1
                raise Busy(
                    f"sessions are at the limit: {value} {what.replace('_', ' ')} of {limit}; "
                    "delete those whose samples you have read, or start the gateway with "
                    "--expire-unread"
                )
