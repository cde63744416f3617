"""One line of the doctor's table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "note", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """What was found. `fail` means that `lockstep demo` cannot run; `note` that something else is
    missing or weaker than it could be. `way_out` is what to do about it."""

    name: str
    status: Status
    found: str
    way_out: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
