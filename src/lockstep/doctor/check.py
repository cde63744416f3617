"""The result of one check of this machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "note", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check: what was found, and `way_out`, what to do about it.

    Status `fail` means that `lockstep demo` cannot run here, `note` that something optional is
    missing, slower or weaker than it could be.
    """

    name: str
    status: Status
    found: str  # prose: allow (a key of --json)
    way_out: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
