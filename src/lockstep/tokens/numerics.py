"""How a process computes: everything that decides the bits of its logprobs, in one value.

An engine reports its plan on its model card and in its ready line. A trainer compares it with its
own before the first step: two processes whose fingerprints differ cannot agree bit for bit.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

PORTABLE_MKL = "COMPATIBLE"
PORTABLE_ENVIRONMENT = {"MKL_CBWR": PORTABLE_MKL, "ATEN_CPU_CAPABILITY": "default"}
"""What a process must find in its environment when it starts, to compute portable bits."""
ArithmeticName = Literal["exact", "portable", "close"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsPlan:
    """What was found on this machine for one model.

    `rows` is the multiple in which rows of matrix products come, 0 where it does not matter. `mkl`
    is MKL's reproducibility mode (`MKL_CBWR`), `isa` the vector instructions that torch uses.
    `fingerprint` is a digest of the bits of a fixed computation, so two machines are compared by
    what they compute and not by what they are called. `reason` says why it is not what was wanted.
    `onednn` is the most that oneDNN may use of the CPU (`ONEDNN_MAX_CPU_ISA`), empty for all.
    """

    arithmetic: ArithmeticName
    device: str
    dtype: str
    rows: int
    mkl: str
    isa: str
    torch: str
    fingerprint: str
    reason: str = ""
    onednn: str = ""

    @property
    def is_exact(self) -> bool:
        """Whether equal weights give equal bits in every process with the same fingerprint."""
        return self.arithmetic != "close"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def joined(self, other: NumericsPlan) -> NumericsPlan:
        """What holds of both: this plan where they agree bit for bit, else close, with why."""
        reason = self.mismatch(other)
        return self if reason is None else replace(self, arithmetic="close", reason=reason)

    def mismatch(self, other: NumericsPlan) -> str | None:
        """Why `other` cannot agree with this one bit for bit; None where it can."""
        for plan in (self, other):
            if not plan.is_exact:
                return plan.reason or "one side computes in close mode"
        if self.fingerprint == other.fingerprint:
            return None
        names = [
            f"{name} {getattr(self, name)!r} here, {getattr(other, name)!r} there"
            for name in ("arithmetic", "device", "dtype", "mkl", "isa", "torch")
            if getattr(self, name) != getattr(other, name)
        ]
        return "the two machines compute other bits: " + (
            ", ".join(names) or f"fingerprint {self.fingerprint} here, {other.fingerprint} there"
        )
