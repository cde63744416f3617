"""Description of a process's arithmetic: everything that determines the bits of its logprobs.

An engine reports its plan on its model card and in its ready line. A trainer compares it with its
own before the first step: two processes whose fingerprints differ cannot agree bit for bit.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

PORTABLE_MKL = "COMPATIBLE"
PORTABLE_ENVIRONMENT = {"MKL_CBWR": PORTABLE_MKL, "ATEN_CPU_CAPABILITY": "default"}
"""Environment variables that a process needs at start to compute portable bits."""
ArithmeticName = Literal["exact", "portable", "close"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsPlan:
    """Arithmetic of this machine for one model.

    `rows` is the multiple to which rows of matrix products are padded, 0 if irrelevant. `mkl` is
    MKL's reproducibility mode (`MKL_CBWR`), `isa` the vector instructions that torch uses.
    `fingerprint` is a digest of the bits of a fixed computation, so that machines are compared by
    their results, not by their names. `reason` says why the plan is not what was requested.
    `onednn` limits the instructions oneDNN may use (`ONEDNN_MAX_CPU_ISA`), empty for no limit.
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
        """Return this plan if both agree bit for bit, else a close plan with the reason."""
        reason = self.mismatch(other)
        return self if reason is None else replace(self, arithmetic="close", reason=reason)

    def mismatch(self, other: NumericsPlan) -> str | None:
        """Return why `other` cannot agree with this plan bit for bit; None if it can."""
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
