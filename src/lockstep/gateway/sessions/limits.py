"""Limits on the number and size of sessions, and the counts that the metrics show."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from lockstep.ledger.matching import EXPLAINED
from lockstep.tokens.errors import Busy, TooLarge

COUNTED = ("turns", "opened", "loaded", "expired", "deleted", "unwritten")
TTL_SECONDS = 86400.0
REFUSALS = ("sessions", "total_bytes", "turns", "bytes")


@dataclass(slots=True)
class SessionCounts:
    """Counts of session events since the start of this gateway, for the metrics."""

    turns: int = 0
    opened: int = 0
    loaded: int = 0
    expired: int = 0
    deleted: int = 0
    unwritten: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    breaks: Counter[str] = field(default_factory=Counter)

    def numbers(self) -> dict[str, int]:
        """Return the counts by the names of their metrics."""
        return {
            **{name: getattr(self, name) for name in COUNTED},
            **{f"refused_{name}": self.refused[name] for name in REFUSALS},
            **{f"breaks_{cause}": self.breaks[cause] for cause in EXPLAINED},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Limits of sessions. Each is an option of a gateway: `--limit NAME=NUMBER`.

    sessions             stored sessions (429 for a new one past it)
    session_turns        turns of one session (413 past it)
    session_bytes        size of one session with all its turns (413 past it)
    total_session_bytes  size of all sessions together (429 past it)
    session_cache_bytes  sessions in memory; past it the least recently used are evicted
    """

    sessions: int = 100_000
    session_turns: int = 1000
    session_bytes: int = 256 << 20
    total_session_bytes: int = 32 << 30
    session_cache_bytes: int = 256 << 20

    def check_session(self, name: str, turns: int, nbytes: int, counts: SessionCounts) -> None:
        """Raise TooLarge when a session may not have one more turn."""
        for what, value, limit in (
            ("turns", turns, self.session_turns),
            ("bytes", nbytes, self.session_bytes),
        ):
            if value >= limit:
                counts.refused[what] += 1
                raise TooLarge(
                    f"session {name!r} has {value} {what}, the limit is {limit}: read its "
                    f"samples and continue in another session, or raise --limit session_{what}"
                )

    def check_all(self, sessions: int, nbytes: int, counts: SessionCounts) -> None:
        """Raise Busy when there may not be one more session, or turn."""
        for what, option, value, limit in (
            ("sessions", "sessions", sessions, self.sessions),
            ("total_bytes", "total_session_bytes", nbytes, self.total_session_bytes),
        ):
            if value >= limit:
                counts.refused[what] += 1
                raise Busy(
                    f"sessions are at the limit: {value} {what.replace('_', ' ')} of {limit}; "
                    "delete sessions whose samples you have read, or start the gateway with "
                    f"--expire-unread or a higher --limit {option}"
                )


SESSION_LIMITS = SessionLimits()
"""The default limits."""
