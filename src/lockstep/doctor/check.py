"""The result of one check of this machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "note", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """`fail` means that `lockstep demo` cannot run here; `note` that something optional is missing
    or slower or weaker than it could be. `found` is what was seen, `way_out` what to do."""

    name: str
    status: Status
    found: str
    way_out: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
