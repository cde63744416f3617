"""Reproducible arithmetic of this process, and the plan by which two processes compare theirs.

    from lockstep.engine.numerics.plan import make_reproducible

    make_reproducible()        # before the first matrix product of the process

Workers, `lockstep train`, `lockstep demo` and `exact.prepare` call it themselves.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.numerics import mkl
from lockstep.engine.numerics.bf16 import VARIABLE as ONEDNN_ISA
from lockstep.engine.numerics.bf16 import make_bf16_safe
from lockstep.engine.numerics.block_shapes import threads
from lockstep.engine.numerics.mkl_choice import preferred_mode
from lockstep.engine.options import EngineOptions
from lockstep.tokens.errors import BadRequest
from lockstep.tokens.numerics import (
    PORTABLE_ENVIRONMENT,
    PORTABLE_MKL,
    ArithmeticName,
    NumericsPlan,
)

log = logging.getLogger(__name__)
PORTABLE_FINGERPRINTS = {"2.13": "3832da0e5310e929"}
"""Confirmed fingerprint of portable arithmetic, by minor version of torch."""


def make_reproducible(*, portable: bool = False) -> bool:
    """Put MKL into a mode in which results do not depend on the batch, here and in children.

    With `portable` the mode gives the same results on every make of CPU. An existing value of
    MKL_CBWR is kept. Returns whether the mode is active: False when the process has already
    computed in another mode, which then remains.
    """
    if portable:
        for name, value in PORTABLE_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    wanted = os.environ.get(mkl.VARIABLE) or preferred_mode()
    if wanted is None:
        return True
    os.environ.setdefault(mkl.VARIABLE, wanted)  # child processes read it when they start
    if mkl.mode() in (mkl.ABSENT, wanted) or mkl.set_mode(wanted):
        return True
    log.info("MKL already computes in mode %s: too late to set %s", mkl.mode(), wanted)
    return False


def prepare_process(options: EngineOptions) -> None:
    """Prepare this process for the arithmetic of these options, before its first product.

    Raises BadRequest for a device that does not exist, and EngineFailure when bf16 products would
    crash the process.
    """
    if options.device != "cpu":
        _check_device(options.device)
        return
    if options.dtype != "float32":
        make_bf16_safe()
    elif options.arithmetic != "close":
        make_reproducible(portable=options.arithmetic == "portable")


def _check_device(name: str) -> None:
    if not re.fullmatch(r"cuda(:\d+)?", name):
        raise BadRequest(f"device is {name!r}, expected cpu, cuda or cuda:N", param="device")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count <= int(name.partition(":")[2] or 0):
        raise BadRequest(
            f"device is {name}, but torch {torch.__version__} sees {count} GPUs here: use device "
            "cpu, or run `lockstep doctor` to check CUDA",
            param="device",
        )


def plan(
    arithmetic: ArithmeticName, *, device: str, dtype: str, rows: int, reason: str = ""
) -> NumericsPlan:
    """Return how this process computes one model, for its model card or a comparison."""
    return NumericsPlan(
        arithmetic=arithmetic,
        device=device,
        dtype=dtype,
        rows=rows if arithmetic != "close" else 0,
        mkl=mkl.mode(),
        isa=isa(),
        torch=str(torch.__version__),
        onednn=os.environ.get(ONEDNN_ISA, "") if dtype != "float32" else "",
        fingerprint=_fingerprint_on(device, dtype) if arithmetic != "close" else "",
        reason=reason,
    )


def warn_of_fallback(problem: str) -> None:
    """Log that this process computes closely although exact arithmetic is offered here.

    Every fallback is logged here, which is where tests watch for fallbacks that they do not expect.
    """
    log.warning("falling back to close arithmetic: %s", problem)


def why_not_portable() -> str | None:
    """Return why this process does not compute the portable bits, or None if it does.

    The bits decide: those of a fixed computation must equal the ones shipped with Lockstep.
    """
    if mkl.mode() != PORTABLE_MKL or isa() != "DEFAULT":
        return (
            f"MKL computes in mode {mkl.mode()} and torch with {isa()} instructions: set "
            "MKL_CBWR=COMPATIBLE and ATEN_CPU_CAPABILITY=default before the process starts"
        )
    version = ".".join(torch.__version__.split(".")[:2])
    expected = PORTABLE_FINGERPRINTS.get(version)
    if expected is None:
        return (
            f"no portable bits are known for torch {version}, only for "
            f"{', '.join(PORTABLE_FINGERPRINTS)}"
        )
    if fingerprint() != expected:
        return f"this CPU computes other bits: fingerprint {fingerprint()}, expected {expected}"
    return None


def _fingerprint_on(device: str, dtype: str) -> str:
    if not device.startswith("cuda"):
        return fingerprint()
    from lockstep.engine.cuda.selftest import fingerprint_on

    return fingerprint_on(device, dtype)


@lru_cache
def fingerprint() -> str:
    """Return a digest of the bits of a fixed computation that covers all functions behind logprobs.

    Two processes with the same fingerprint give equal logprobs for equal weights, if both have row
    multiples that hold. The row counts here are multiples of all of those.
    """
    digest = hashlib.sha256()

    def take(result: Tensor) -> None:
        digest.update(result.contiguous().numpy().tobytes())

    with torch.inference_mode(), threads(1):
        for inputs, outputs in ((64, 64), (128, 768), (384, 128), (1024, 512), (3072, 192)):
            take(F.linear(_numbers(64, inputs), _numbers(outputs, inputs)))
        x = 8 * _numbers(64, 512)
        for function in (torch.exp, F.silu, torch.cos, torch.sin):
            take(function(x))
        take(x.square().sum(-1, keepdim=True).rsqrt())
        take(torch.softmax(x, dim=-1))
        take(torch.log_softmax(x, dim=-1))
        for dim in (32, 128):
            q, k, v = (_numbers(length, dim)[None, None] for length in (64, 1024, 1024))
            bias = torch.full((64, 1024), float("-inf")).triu_(961)
            take(F.scaled_dot_product_attention(q, k, v, attn_mask=bias))
    return digest.hexdigest()[:16]


def _numbers(rows: int, columns: int) -> Tensor:
    """Return fixed values between -1 and 1, derived from integers: equal on every machine."""
    index = torch.arange(rows * columns, dtype=torch.int64)
    mixed = (index * 2654435761 + 12345) % 65521
    return ((mixed - 32760).float() / 32768).view(rows, columns)


def isa() -> str:
    """Return the vector instructions that torch itself uses: DEFAULT, AVX2 or AVX512."""
    return str(torch.backends.cpu.get_cpu_capability())
