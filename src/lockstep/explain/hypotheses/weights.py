"""Hypotheses about the weights, adapters, caches and routes that an engine really used."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from lockstep.checkpoint.tensor_names import EMBEDDING, HEAD
from lockstep.explain.hypotheses.fits import fit
from lockstep.explain.hypotheses.hypothesis import PASS, SEARCH, Candidate, Hypothesis, Trial
from lockstep.explain.setting import Boundary, Overlay, Setting, StaleCache

LAYER = re.compile(r"model\.layers\.(\d+)\.")
EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts\.\d+)\.")
STALE = 0.5
"""Coefficient from which a group of tensors is taken to be stale: 1 is stale, 0 is current."""
BLOCKS = (16, 1, 128)
"""Block sizes of prefix caches: of vLLM and Lockstep, SGLang, and vLLM on a CPU."""
BOUNDARIES: dict[Boundary, str] = {
    "prompt": "in the first prompt",
    "turn before": "up to the end of the turn before the last",
    "last turn": "in the prompt of the last turn",
    "version": "before the version changed",
}
SEARCHED = 2
"""Checkpoints within which single tensors are searched."""


def other_weights(trial: Trial) -> Iterator[Candidate]:
    labels = {group.version for group in trial.case.groups}
    if any(label in labels for label, _ in trial.case.others):
        values = trial.scorer.values(trial.base)
        yield Candidate(
            "wrong_version_label", "the weights of the checkpoint", values, trial.base, partial=True
        )
    for label, path in trial.case.others:
        if not trial.scorer.differing(path):
            continue
        cause = "wrong_version_label" if label in labels else "old_weights"
        setting = trial.base.with_(overlay=Overlay(path))
        yield Candidate(
            cause, f"all weights of {label or path.name}", trial.scorer.values(setting), setting,
            partial=True,
        )  # fmt: skip
        for names, negated, detail in (
            ((HEAD,), False, "head of {}, body current"),
            ((HEAD,), True, "body of {}, head current"),
            ((EMBEDDING,), False, "embedding of {}, rest current"),
        ):
            overlay = Overlay(path, names, negated)
            setting = trial.base.with_(overlay=overlay)
            yield Candidate(
                "old_tensors", detail.format(label or path.name), trial.scorer.values(setting),
                setting, partial=True, location=", ".join(names) if not negated else "all but head",
            )  # fmt: skip


def some_tensors(trial: Trial) -> Iterator[Candidate]:
    """Yield sets of tensors that kept old values: layers first, then tensors within them.

    The effects of small changes add up, so that a least-squares fit of the effect of each group
    alone finds the groups; the set is then substituted as a whole.
    """
    for label, path in trial.case.others[:SEARCHED]:
        differing = trial.scorer.differing(path)
        if not differing:
            continue
        layers = _grouped(differing, _layer_of)
        coarse = list(_attribute(trial, path, label, layers))
        yield from coarse
        chosen = {name for candidate in coarse for name in _names(candidate, differing)}
        touched = {_layer_of(name) for name in chosen}
        if not chosen or len(touched) > max(4, len(layers) // 2):
            continue
        inside = [name for name in differing if _layer_of(name) in touched]
        parts = _grouped(inside, _part_of)
        finer = list(_attribute(trial, path, label, parts))
        yield from finer
        if any(len(names) > 1 for names in parts.values()):
            experts = [n for candidate in finer for n in _names(candidate, differing)]
            yield from _attribute(trial, path, label, {name: [name] for name in set(experts)})


def _names(candidate: Candidate, differing: Sequence[str]) -> list[str]:
    overlay = candidate.setting.overlay if candidate.setting else None
    return [] if overlay is None else [name for name in differing if overlay.takes(name)]


def _layer_of(name: str) -> str:
    match = LAYER.match(name)
    return f"layer {match[1]}" if match else name


def _part_of(name: str) -> str:
    match = EXPERT.match(name)
    return match[1] if match else name


def _grouped(names: Sequence[str], key: object) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for name in names:
        grouped.setdefault(key(name), []).append(name)  # type: ignore[operator]
    return grouped


def _attribute(
    trial: Trial, path: Path, label: str, groups: Mapping[str, Sequence[str]]
) -> Iterator[Candidate]:
    """Yield the best single group, all but it, and the groups that a joint fit selects."""
    gap = trial.target - trial.expected
    effects: dict[str, np.ndarray] = {}
    for group, names in groups.items():
        setting = _overlaid(trial, path, names)
        effects[group] = trial.scorer.values(setting) - trial.expected
    if not effects:
        return
    columns = np.stack(list(effects.values()), axis=1)
    finite = np.isfinite(columns).all(axis=1) & np.isfinite(gap)
    left = {
        group: float(np.abs(gap[finite] - effect[finite]).mean())
        for group, effect in effects.items()
    }
    order = sorted(left, key=lambda group: left[group])
    chosen = [[order[0]]]
    weights, *_ = np.linalg.lstsq(columns[finite], gap[finite], rcond=1e-6)
    joint = [group for group, weight in zip(effects, weights, strict=True) if weight > STALE]
    if joint and joint not in chosen:
        chosen.append(joint)
    if len(groups) > 2:
        worst = sorted(left, key=lambda group: -left[group])[0]
        chosen.append([group for group in groups if group != worst])
    for selection in chosen:
        if len(selection) == len(groups) > 1:
            continue
        names = [name for group in selection for name in groups[group]]
        setting = _overlaid(trial, path, names)
        names_shown = ", ".join(selection[:6]) + (" ..." if len(selection) > 6 else "")
        yield Candidate(
            "old_tensors", f"{names_shown} of {label or path.name}", trial.scorer.values(setting),
            setting, partial=True, location=names_shown,
        )  # fmt: skip


def _overlaid(trial: Trial, path: Path, names: Sequence[str]) -> Setting:
    return trial.base.with_(overlay=Overlay(path, tuple(names)))


def adapters(trial: Trial) -> Iterator[Candidate]:
    own = trial.base.adapter
    if own is not None:
        setting = trial.base.with_(adapter=None)
        yield Candidate(
            "adapter_missing", f"without {own.name}", trial.scorer.values(setting), setting,
            partial=True,
        )  # fmt: skip
    for path in trial.case.other_adapters:
        if path != own:
            setting = trial.base.with_(adapter=path)
            yield Candidate(
                "adapter_wrong" if own else "adapter_unexpected", f"with {path.name}",
                trial.scorer.values(setting), setting, partial=True,
            )  # fmt: skip


def adapter_scale(trial: Trial) -> Iterator[Candidate]:
    def at(scale: float) -> Setting:
        return trial.base.with_(adapter_scale=scale)

    grid = (0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
    scale, values = fit(lambda x: trial.scorer.values(at(x)), trial.target, grid, steps=10)
    if scale not in (0.0, 1.0):
        detail = f"scaled by {scale:.4g}" + (", as if merged twice" if scale == 2 else "")
        yield Candidate("adapter_scale", detail, values, at(scale))


def stale_cache(trial: Trial) -> Iterator[Candidate]:
    groups = trial.case.groups
    boundaries: list[Boundary] = ["prompt"]
    if any(group.turn for group in groups):
        boundaries += ["turn before", "last turn"]
    if len({(g.sample, g.version) for g in groups}) > len({g.sample for g in groups}):
        boundaries.append("version")
    for label, path in trial.case.others:
        if not trial.scorer.differing(path):
            continue
        for boundary in boundaries:
            for block in BLOCKS:
                stale = StaleCache(path, boundary, block)
                setting = trial.base.with_(stale=stale)
                yield Candidate(
                    "stale_kv",
                    f"KV of {label or path.name} {BOUNDARIES[boundary]}, in blocks of {block}",
                    trial.scorer.values(setting), setting, partial=True,
                    location="tokens after a cached prefix",
                )  # fmt: skip


def routes(trial: Trial) -> Iterator[Candidate]:
    setting = trial.base.with_(experts="recorded")
    yield Candidate(
        "routed_experts", "recorded experts replayed", trial.scorer.values(setting), setting
    )
    setting = trial.base.with_(experts="dummy last")
    yield Candidate(
        "dummy_route", "recorded experts replayed, a dummy for the last token of each turn",
        trial.scorer.values(setting), setting,
    )  # fmt: skip


def _has_others(trial: Trial) -> bool:
    return bool(trial.case.others)


def _has_routes(trial: Trial) -> bool:
    return trial.scorer.is_moe and all(s.experts is not None for s in trial.case.samples)


HELD_WEIGHTS = (
    Hypothesis("adapters", PASS, lambda trial: bool(
        trial.base.adapter or trial.case.other_adapters), adapters),
    Hypothesis("other weights", PASS, _has_others, other_weights),
    Hypothesis("routes", PASS, _has_routes, routes),
    Hypothesis("stale cache", PASS, _has_others, stale_cache, sides=("engine",)),
    Hypothesis("adapter scale", SEARCH, lambda trial: bool(trial.base.adapter), adapter_scale),
    Hypothesis("single tensors", SEARCH, _has_others, some_tensors),
)  # fmt: skip
