"""Checks that need torch. Run as a program, the module prints them as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import torch

from lockstep.doctor.check import Check
from lockstep.doctor.host import cores
from lockstep.engine.core import Core
from lockstep.engine.numerics import plan as numerics
from lockstep.engine.numerics import selftest
from lockstep.engine.numerics.bf16 import make_bf16_safe
from lockstep.engine.options import EngineOptions
from lockstep.models import bundled
from lockstep.tokens.errors import EngineFailure, LockstepError

GPU_TYPES: dict[str, Literal["bfloat16", "float32"]] = {"bf16": "bfloat16", "fp32": "float32"}
ON_GPU = EngineOptions(device="cuda", max_seqs=4, max_model_len=256, warm_seconds=0)


def checks() -> Iterator[Check]:
    """Yield the checks of instructions, threads, exactness, bf16 and CUDA."""
    bf16_check = bf16()  # first, because oneDNN reads its limit only once
    yield Check("torch", "ok", f"{torch.__version__} with {numerics.isa()} instructions")
    yield threads()
    yield exact()
    yield bf16_check
    yield cuda()


def threads() -> Check:
    """Check whether torch uses more threads than this process has cores."""
    count = torch.get_num_threads()
    if count > cores():
        finding = f"torch uses {count}, but this process may use {cores()} cores"
        return Check("threads", "note", finding, f"export OMP_NUM_THREADS={cores()}")
    return Check("threads", "ok", f"torch uses {count} of {cores()} cores, a worker 1")


def exact() -> Check:
    """Check whether engine and trainer compute equal logprobs, by running both."""
    report = selftest.run("tiny")
    how = f"MKL {report.plan.mkl}, rows in multiples of {report.plan.rows}"
    if report.exact:
        count = len(report.checks)
        return Check("exact", "ok", f"yes, in fp32: {count} comparisons bit for bit, {how}")
    return Check("exact", "note", f"no: {report.problem} ({how})", "runs use close mode")


def bf16() -> Check:
    """Check whether bf16 products run. Some hypervisors list instructions that they forbid."""
    try:
        limit = make_bf16_safe()
    except EngineFailure as error:
        return Check("bf16", "note", error.message, "--dtype float32, which is the default")
    if limit:
        finding = f"safe with oneDNN limited to {limit}; without the limit it may crash here"
        way_out = f"workers set it themselves; elsewhere export ONEDNN_MAX_CPU_ISA={limit}"
        return Check("bf16", "note", finding, way_out)
    return Check("bf16", "ok", "safe")


def cuda() -> Check:
    """Check which GPUs torch can use."""
    if not torch.cuda.is_available():
        if (made_for := torch.version.cuda) is None:
            why, way_out = "this torch has no CUDA", "install torch for CUDA on a GPU machine"
        else:
            why = f"no GPU is visible to this torch, made for CUDA {made_for}"
            way_out = "if there is one, check nvidia-smi and CUDA_VISIBLE_DEVICES"
        return Check("CUDA", "note", f"{why} (optional)", way_out)
    names = {torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())}
    finding = f"{torch.cuda.device_count()} x {', '.join(sorted(names))}, CUDA {torch.version.cuda}"
    try:
        return Check("CUDA", "ok", f"{finding}; {on_gpu()}")
    except (LockstepError, RuntimeError) as error:
        return Check(
            "CUDA", "note", f"{finding}, but no engine runs on it: {error}", "--device cpu"
        )


def on_gpu() -> str:
    """Describe how engines run on the first GPU, by starting them with the bundled model."""
    directory = bundled("tiny")
    if directory is None:
        raise EngineFailure("the bundled model tiny is missing")
    findings = []
    for name, dtype in GPU_TYPES.items():
        core = Core(directory, replace(ON_GPU, dtype=dtype))
        speed = "with CUDA graphs" if core.overlapped else "without graphs and kernels"
        how = f"close: {core.arithmetic_note}"
        if core.plan.is_exact:
            how = "exact: engine and trainer agree bit for bit"
        findings.append(f"{name} {speed}, {how}")
    return "; ".join(findings)


if __name__ == "__main__":
    sys.stdout.write(json.dumps([check.to_json() for check in checks()]))
