"""Hypotheses about the model's definition and the formats it computes and stores in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from lockstep.explain.case import Values
from lockstep.explain.hypotheses.fits import fit, loss
from lockstep.explain.hypotheses.hypothesis import PASS, SEARCH, Candidate, Hypothesis, Trial

THETAS = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)
FACTORS = (0.25, 0.5, 2.0, 4.0, 8.0, 16.0)
WINDOWS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def _candidate(trial: Trial, cause: str, detail: str, **changes: Any) -> Candidate:
    setting = trial.base.with_(**changes)
    return Candidate(cause, detail, trial.scorer.values(setting), setting)


def rope(trial: Trial) -> Iterator[Candidate]:
    own = trial.scorer.config.rope_theta
    for theta in THETAS:
        if theta != own:
            yield _candidate(trial, "rope", f"rope_theta {theta:g} (not {own:g})",
                             rope_theta=theta)  # fmt: skip
    for factor in FACTORS:
        yield _candidate(trial, "rope", f"linear rope scaling {factor:g}", rope_factor=factor)
    if trial.scorer.config.rope_llama3 is not None:
        yield _candidate(trial, "rope", "rope scaling missing", plain_rope=True)


def rope_theta(trial: Trial) -> Iterator[Candidate]:
    """Search an unusual theta, where no usual one fits."""

    def values(theta: float) -> Values:
        return trial.scorer.values(trial.base.with_(rope_theta=theta))

    grid = (3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0, 6.5, 7.0)
    exponent, _ = fit(lambda at: values(10**at), trial.target, grid, 14)
    near = {float(f"{10**exponent:.{digits}g}") for digits in (1, 2, 3, 6)}
    theta = min(near, key=lambda value: loss(values(value), trial.target))
    setting = trial.base.with_(rope_theta=theta)
    yield Candidate("rope", f"rope_theta {theta:g}", values(theta), setting)


def window(trial: Trial) -> Iterator[Candidate]:
    """Yield sliding windows: usual sizes, and those that end near the first wrong position."""
    sizes = np.abs(trial.target - trial.expected)
    wrong = trial.case.positions[sizes > trial.band.high]
    longest = int(trial.case.positions.max())
    near = [int(wrong.min()) - back for back in range(4)] if len(wrong) else []
    for width in sorted({*WINDOWS, *near}):
        if 1 < width < longest:
            yield _candidate(trial, "window", f"sliding window of {width} tokens", window=width)


def formats(trial: Trial) -> Iterator[Candidate]:
    own = trial.base.rounding
    for kind in ("bfloat16", "float16"):
        if kind != own:
            yield _candidate(trial, "weights_dtype", f"weights in {kind}", rounding=kind)
        if own is None:
            yield _candidate(trial, "kv_dtype", f"KV cache in {kind}", kv=kind)
            yield _candidate(trial, "head_dtype", f"head in {kind}", head=kind)
            yield _candidate(trial, "compute_dtype", f"all arithmetic in {kind}", compute=kind)
    if own is not None:
        yield _candidate(trial, "weights_dtype", "weights in float32", rounding=None)
    yield _candidate(trial, "kv_quantised", "KV cache in fp8", kv="fp8")
    yield _candidate(trial, "kv_quantised", "KV cache in int8", kv="int8")
    for quantised in ("fp8", "int8", "int4"):
        yield _candidate(trial, "weights_quantised", f"weights in {quantised}",
                         rounding=quantised)  # fmt: skip


def constants(trial: Trial) -> Iterator[Candidate]:
    own = trial.scorer.config.eps
    for eps in (1e-5, 1e-6, 1e-8):
        if eps != own:
            yield _candidate(trial, "norm_eps", f"rms_norm_eps {eps:g} (not {own:g})", eps=eps)
    if trial.scorer.is_moe:
        normal = not trial.scorer.config.normalize_top_k
        yield _candidate(trial, "router_norm", f"norm_topk_prob {normal}",
                         normalize_experts=normal)  # fmt: skip


DEFINITION = (
    Hypothesis("rope", PASS, lambda trial: trial.scorer.has_one_rope, rope),
    Hypothesis("sliding window", PASS, lambda _: True, window),
    Hypothesis("formats", PASS, lambda _: True, formats),
    Hypothesis("constants", PASS, lambda _: True, constants),
    Hypothesis("rope theta", SEARCH, lambda trial: trial.scorer.has_one_rope, rope_theta),
)
