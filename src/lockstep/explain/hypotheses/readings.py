"""Hypotheses about what the number of a token means: other readings of the same logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from lockstep.engine.processing import penalizes
from lockstep.explain.band import sizes_of
from lockstep.explain.case import Values
from lockstep.explain.hypotheses.fits import fit, shortest
from lockstep.explain.hypotheses.hypothesis import READING, Candidate, Hypothesis, Trial
from lockstep.explain.setting import Setting
from lockstep.tokens import ShapedSpan, Shaping

SHAPES = tuple(Shaping.__dataclass_fields__)
TEMPERATURES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0)
BIASED = 3
"""Tokens that are tried as the only one with a logit bias."""
LOG_BASES = {"log2": 1 / np.log(2), "log10": 1 / np.log(10)}


def _always(_: Trial) -> bool:
    return True


def _shaping(trial: Trial) -> dict[str, Any]:
    """Return the options that all spans of the samples share, without those that are neutral."""
    if trial.base.shaping is not None:
        return dict(trial.base.shaping)
    shapes = {span.shaping for sample in trial.case.samples for span in sample.shaping
              if span.shaping.logit_bias is None}  # fmt: skip
    if len(shapes) != 1:
        return {}
    (shape,) = shapes
    neutral = Shaping()
    return {
        name: getattr(shape, name)
        for name in SHAPES
        if getattr(shape, name) != getattr(neutral, name)
    }


def _spans(trial: Trial) -> list[ShapedSpan]:
    return [span for sample in trial.case.samples for span in sample.shaping]


def _with_shaping(trial: Trial, **changes: Any) -> Setting:
    shaping = _shaping(trial) | changes
    return trial.base.with_(mode="processed", shaping=tuple(sorted(shaping.items(), key=repr)))


def _values(trial: Trial, setting: Setting) -> Values:
    return trial.scorer.values(setting)


def raw_or_processed(trial: Trial) -> Iterator[Candidate]:
    modes = {sample.logprob_mode for sample in trial.case.samples}
    for mode in ("raw", "processed"):
        if modes != {mode}:
            setting = trial.base.with_(mode=mode)
            yield Candidate("raw_processed", f"{mode} logprobs", _values(trial, setting), setting)
    # With truncation alone, "support" has the same numbers.
    if any(penalizes(span.shaping) or span.shaping.logit_bias for span in _spans(trial)):
        setting = trial.base.with_(mode="processed", shaping=())
        yield Candidate(
            "shaping_ignored", "only the temperature applied", _values(trial, setting), setting
        )


def temperature(trial: Trial) -> Iterator[Candidate]:
    def at(value: float) -> Setting:
        return trial.base.with_(mode="processed", temperature=value)

    value, values = fit(lambda x: _values(trial, at(x)), trial.target, TEMPERATURES)
    used = {sample.temperature for sample in trial.case.samples}
    if value not in used:
        yield Candidate("temperature", f"temperature {value:.4g}", values, at(value))


def penalties(trial: Trial) -> Iterator[Candidate]:
    grids = {
        "repetition_penalty": (0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 1.8, 2.2),
        "presence_penalty": (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0),
        "frequency_penalty": (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0),
    }
    own = _shaping(trial)
    for name, grid in grids.items():
        neutral = getattr(Shaping(), name)
        if name in own:
            setting = _with_shaping(trial, **{name: neutral})
            yield Candidate("penalty", f"without {name}", _values(trial, setting), setting)

        def at(x: float, name: str = name) -> Setting:
            return _with_shaping(trial, **{name: x})

        value, values = fit(lambda x: _values(trial, at(x)), trial.target, grid, steps=12)
        if value not in (neutral, own.get(name)):
            yield Candidate("penalty", f"{name} {value:.4g}", values, at(value))


def truncation(trial: Trial) -> Iterator[Candidate]:
    """Yield top_k, top_p and min_p that keep the mass by which the numbers differ."""
    own = _shaping(trial)
    cut = {name: getattr(Shaping(), name) for name in ("top_k", "top_p", "min_p")}
    whole = _with_shaping(trial, **cut).with_(support="ignored")
    values = _values(trial, whole)
    if any(name in own for name in cut) or any(s.support for s in trial.case.samples):
        yield Candidate("support", "normalised over the whole vocabulary", values, whole)
    mass_left = np.exp(values - trial.target)
    if not np.isfinite(mass_left).all() or np.median(mass_left) > 1 + trial.band.high:
        return
    probs, places = _probabilities(trial, whole)
    kept_N = torch.from_numpy(mass_left[places])
    ordered = probs.sort(dim=-1, descending=True).values
    mass = ordered.cumsum(dim=-1)
    size_N = (mass - kept_N[:, None]).abs().argmin(dim=-1) + 1
    last = ordered.gather(-1, size_N[:, None] - 1).squeeze(-1)
    after = ordered.gather(-1, size_N.clamp(max=ordered.shape[-1] - 1)[:, None]).squeeze(-1)
    cuts = size_N < ordered.shape[-1]
    if not bool(cuts.any()):
        return
    options: list[dict[str, Any]] = [{"top_k": int(size_N.median())}]
    # The set ends with the token that reaches top_p, and min_p separates two neighbours.
    reached = mass.gather(-1, size_N[:, None] - 1).squeeze(-1)[cuts]
    for name, low, high in (
        ("top_p", float((reached - last[cuts]).quantile(0.9)), float(reached.quantile(0.1))),
        ("min_p", float((after / ordered[:, 0])[cuts].quantile(0.9)),
         float((last / ordered[:, 0])[cuts].quantile(0.1))),
    ):  # fmt: skip
        if high > 0 and low < high:
            options.append({name: min(shortest(max(low, 0.0), high), 1.0)})
    for option in options:
        setting = _with_shaping(trial, **(cut | option)).with_(support="ignored")
        detail = ", ".join(f"{name} {value:g}" for name, value in option.items())
        yield Candidate("truncation", detail, _values(trial, setting), setting)


def _probabilities(trial: Trial, setting: Setting) -> tuple[torch.Tensor, Any]:
    """Return the probabilities of the whole vocabulary (N, vocab) at the temperature in use."""
    rows, places = [], []
    for sequence, logits in trial.scorer.logits(setting):
        sample = trial.case.samples[sequence.sample]
        heat = sample.temperature if setting.temperature is None else setting.temperature
        raw = sample.logprob_mode == "raw" and setting.mode == "recorded"
        rows.append(torch.softmax((logits if raw else logits / (heat or 1.0)).cpu(), dim=-1))
        places.append(sequence.places)
    return torch.cat(rows), np.concatenate(places)


def logit_bias(trial: Trial) -> Iterator[Candidate]:
    """Yield a bias on the one token whose probability explains the missing mass best.

    With a bias on token b, another token's probability is divided by 1 + c p(b).
    """
    probs, places = _probabilities(trial, trial.base)
    missing = torch.from_numpy(np.exp(trial.expected - trial.target)[places] - 1).float()
    if not bool(torch.isfinite(missing).all()):
        return
    drawn = torch.cat(
        [torch.from_numpy(sequence.tokens) for sequence, _ in trial.scorer.logits(trial.base)]
    )
    own = probs.gather(-1, drawn[:, None]).squeeze(-1)
    products = (probs * missing[:, None]).sum(0).index_add(0, drawn, -own * missing)
    squares = (probs**2).sum(0).index_add(0, drawn, -(own**2))
    explained = torch.where(squares > 1e-6, products**2 / squares.clamp(min=1e-6), 0.0)
    for token in explained.topk(min(BIASED, len(explained))).indices.tolist():
        change = float(products[token] / squares[token].clamp(min=1e-6))
        bias = -100.0 if change <= -0.98 else float(np.log1p(change))
        heat = trial.base.temperature or trial.case.samples[0].temperature or 1.0
        bias = round(max(bias * heat, -100.0), 2)
        if abs(bias) < 0.01:
            continue
        # A dict is no key, and settings are keys: the bias is applied here.
        values = trial.expected.copy()
        row = torch.log(probs)
        row[:, token] += bias / heat
        chosen = torch.log_softmax(row, dim=-1).gather(-1, drawn[:, None]).squeeze(-1)
        values[places] = chosen.double().numpy()
        yield Candidate("logit_bias", f"token {token} by {bias:g}", values)


def other_number(trial: Trial) -> Iterator[Candidate]:
    """Yield numbers that are not the logprob of the sampled token."""
    setting = trial.base.with_(read="most likely")
    yield Candidate("not_sampled", "the most likely token", _values(trial, setting), setting)
    zero = (trial.target == 0.0) & (trial.expected < -trial.band.high)
    if zero.any():
        values = np.where(zero, 0.0, trial.expected)
        yield Candidate("missing_zero", f"{int(zero.sum())} numbers are exactly 0", values)
    for name, factor in LOG_BASES.items():
        yield Candidate("log_base", name, trial.expected * factor)
    yield Candidate("log_base", "probabilities", np.exp(trial.expected))


def shifted(trial: Trial) -> Iterator[Candidate]:
    """Yield the numbers of neighbouring tokens, and those of another choice."""
    for shift in (-1, 1, -2, 2):
        values = np.full_like(trial.expected, np.nan)
        for group in trial.case.groups:
            own = trial.expected[group.places]
            if len(own) <= abs(shift):
                continue
            if shift > 0:
                values[group.places][:-shift] = own[shift:]
            else:
                values[group.places][-shift:] = own[:shift]
        yield Candidate("off_by_one", f"numbers of tokens {shift:+d} places away", values)
    yield from _other_choice(trial)


def _other_choice(trial: Trial) -> Iterator[Candidate]:
    values = trial.expected.copy()
    swapped = 0
    for group in trial.case.groups:
        own = trial.target[group.places]
        if sizes_of(own - trial.expected[group.places]).mean() <= trial.band.high:
            continue
        for other in trial.case.groups:
            theirs = trial.expected[other.places][: len(own)]
            if other is group or len(theirs) < len(own) or len(own) < 4:
                continue
            if sizes_of(own - theirs).max() <= trial.band.high:
                values[group.places] = theirs
                swapped += 1
                break
    if swapped:
        yield Candidate("mixed_choices", f"{swapped} turns have another turn's numbers", values)


def rounded_logits(trial: Trial) -> Iterator[Candidate]:
    for kind in ("bfloat16", "float16"):
        setting = trial.base.with_(logits=kind)
        yield Candidate("logits_dtype", f"logits in {kind}", _values(trial, setting), setting)


READINGS = (
    Hypothesis("raw or processed", READING, _always, raw_or_processed),
    Hypothesis("another number", READING, _always, other_number),
    Hypothesis("off by one", READING, _always, shifted),
    Hypothesis("temperature", READING, _always, temperature),
    Hypothesis("truncation", READING, _always, truncation),
    Hypothesis("penalties", READING, _always, penalties),
    Hypothesis("logit bias", READING, _always, logit_bias),
    Hypothesis("dtype of logits", READING, _always, rounded_logits),
)
