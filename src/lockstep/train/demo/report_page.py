"""`report.html`: a run as one page that opens from disk and loads nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

from lockstep.run_record import Row, Run, Summary, describe, figure, lanes

SAMPLE_BYTES = 2_400_000
"""Room for the samples; the page with everything else stays under 3 MB."""

SERIES = (
    "reward", "reward_std", "solved", "mismatch_kl", "masked_mismatch_kl", "is_masked",
    "is_masked_low", "is_masked_high", "entropy", "loss", "grad_norm", "lr", "tokens",
    "tokens_per_second", "off_policy", "off_policy_max", "breaks", "aborts", "dropped",
    "pause_seconds", "time/rollout", "time/train", "time/save", "time/update", "time/step",
)  # fmt: skip

HONEST = (
    "The starting checkpoint was first trained to solve this task, then trained for a while to "
    "show a bad habit instead. Reinforcement learning re-selects a behaviour that was suppressed "
    "on purpose. The curve shows that the machinery works from end to end; it does not show the "
    "discovery of a new skill."
)
"""What a reader must know of the bundled models before they believe a curve."""

BUNDLED = ("tiny", "tiny-moe")


def write_report(directory: str | Path, path: str | Path | None = None) -> Path:
    """Writes the page of the run in `directory`, by default into it, and returns its path."""
    target = Path(path) if path is not None else Path(directory) / "report.html"
    page = render(Run.read(directory))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page, "utf-8")
    return target.resolve()


def render(run: Run) -> str:
    """The whole page. Text of the run reaches it escaped, or as data that is never HTML."""
    summary = run.summary()
    template = files("lockstep.train.demo").joinpath("report_page.html").read_text("utf-8")
    title = f"{task_of(run)} on {run.about.get('model', 'an unnamed model')}"
    parts = {
        "<!--title-->": escape(f"Lockstep: {title}"),
        "<!--headline-->": _headline(run, summary, title),
        "<!--tiles-->": "".join(_tiles(run, summary)),
        "<!--events-->": _events(run),
        "<!--config-->": _config(run.about),
        "<!--data-->": _script(_payload(run)),
    }
    for mark, part in parts.items():
        before, match, after = template.partition(mark)
        if not match:
            raise ValueError(f"the template has no {mark}")
        template = before + part + after
    return template


def task_of(run: Run) -> str:
    """The name of the task, as the run's configuration or its samples give it."""
    return str(run.about.get("env") or (run.samples or [{}])[0].get("env") or "training run")


def _headline(run: Run, summary: Summary, title: str) -> str:
    begun = datetime.fromtimestamp(run.start, UTC).strftime("%d %B %Y, %H:%M UTC")
    facts = [
        f"{len(run.steps)} steps in {summary.seconds:.0f} s",
        f"{len(summary.versions)} workers",
        f"{summary.tokens:,} sampled tokens",
        *([f"seed {run.about['seed']}"] if "seed" in run.about else []),
        *([begun] if run.start else []),
    ]
    items = "".join(f"<li>{escape(fact)}</li>" for fact in facts)
    honest = f'<p class="honest"><b>Read this first.</b> {escape(HONEST)}</p>'
    bundled = Path(str(run.about.get("model", ""))).name in BUNDLED
    return f"<h1>{escape(title)}</h1><ul class=facts>{items}</ul>{honest if bundled else ''}"


def _tiles(run: Run, summary: Summary) -> Iterable[str]:
    before, after = summary.reward_before, summary.reward_after
    if before is not None and after is not None:
        yield _tile("Held-out reward", f"{before:.2f} → {after:.2f}",
                    "before and after, on prompts never trained on", after > before)  # fmt: skip
    else:
        first, last = run.steps[0]["reward"], run.steps[-1]["reward"]
        yield _tile("Training reward", f"{first:.2f} → {last:.2f}", "first and last step", None)
    yield _mismatch(summary)
    yield _tile("Masked tokens", figure(100 * summary.masked) + (" %" if summary.masked else ""),
                "sampled tokens the loss had to ignore", summary.masked == 0)  # fmt: skip
    yield _tile("Prefix breaks", figure(summary.breaks),
                "turns whose prompt lost the ids before it", summary.breaks == 0)  # fmt: skip
    served = ", ".join(sorted(set(summary.versions.values()))) or "unknown"
    yield _tile("Weights at the end", served,
                f"{'the same' if summary.agreed else 'not the same'} on "
                f"{len(summary.versions)} workers", summary.agreed)  # fmt: skip
    yield _tile("Pause per update", f"{summary.pause_seconds * 1e3:.1f} ms",
                f"median; longest {summary.longest_pause * 1e3:.1f} ms", None)  # fmt: skip
    yield _tile("Step time", f"{summary.step_seconds:.2f} s",
                "median: rollout, training and verified update", None)  # fmt: skip
    if summary.skipped:
        yield _tile("Skipped steps", figure(summary.skipped),
                    "nothing to learn from: the weights stayed as they were", None)  # fmt: skip
    yield _tile("Aborted answers", figure(summary.aborts),
                "kept with their tokens, not trained on", None)  # fmt: skip


def _mismatch(summary: Summary) -> str:
    if summary.close_bound is not None:
        note = f"{summary.mismatch}; allowed is {summary.close_bound:g}"
        return _tile("Mismatch", figure(summary.max_difference), note, summary.near)
    if summary.mismatch_kl == 0:
        return _tile("Mismatch KL", "exactly 0", "trainer and engine agree bit for bit", True)
    good = summary.mismatch_kl < 1e-3
    return _tile("Mismatch KL", figure(summary.mismatch_kl), "largest of any step", good)


def _tile(name: str, value: str, note: str, good: bool | None) -> str:
    mark = {True: '<span class="mark good" title="as it should be">✓</span>',
            False: '<span class="mark bad" title="not as it should be">✗</span>',
            None: ""}[good]  # fmt: skip
    return (
        f'<div class="tile"><div class="name">{escape(name)}{mark}</div>'
        f'<div class="value">{escape(value)}</div><div class="note">{escape(note)}</div></div>'
    )


def _events(run: Run) -> str:
    rows = [
        f"<li><time>{float(event['time']) - run.start:.1f} s</time>{escape(describe(event))}</li>"
        for event in _shown(run)
    ]
    return "".join(rows) or "<li>nothing happened besides the updates</li>"


def _shown(run: Run) -> list[Row]:
    """Events worth a line: updates happen at every step, and are drawn."""
    return [event for event in run.events if event["kind"] != "update"]


def _config(about: Row) -> str:
    return "".join(
        f"<tr><th scope=row>{escape(name)}</th><td>{escape(str(value))}</td></tr>"
        for name, value in _flat(about)
    )


def _flat(values: Row, above: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield above + key, value


def _payload(run: Run) -> Row:
    ends = run.ends()
    workers = sorted({w["id"] for step in run.steps for w in step.get("workers", ())})
    names, samples, left_out = _pack(run.samples)
    return {
        "steps": [step["step"] for step in run.steps],
        "series": {
            name: [_number(step.get(name)) for step in run.steps]
            for name in SERIES
            if any(step.get(name) is not None for step in run.steps)
        },
        "versions": [str(step.get("version", "")) for step in run.steps],
        "ends": [round(end, 3) for end in ends],
        "workers": workers,
        "lanes": lanes(run),
        "events": [
            {
                "at": round(float(event["time"]) - run.start, 3),
                "kind": event["kind"],
                "text": describe(event),
            }
            for event in _shown(run)
        ],
        "names": names,
        "samples": samples,
        "left_out": left_out,
    }


def _pack(samples: Sequence[Row]) -> tuple[list[list[Any]], list[Row], int]:
    """The samples without repetition, and how many did not fit.

    Token strings go into one table. Logprobs of the trainer are left out where they are the very
    number of the engine: the difference is taken here, before anything is rounded for the page.
    """
    table: dict[tuple[int, str], int] = {}
    packed = [_pack_one(sample, table) for sample in samples]
    sizes = [len(json.dumps(each)) for each in packed]
    keep = min(1.0, SAMPLE_BYTES / max(1, sum(sizes)))
    # evenly over the run, so that no step loses all of its samples
    kept = [each for at, each in enumerate(packed) if int((at + 1) * keep) > int(at * keep)]
    return [[number, text] for number, text in table], kept, len(packed) - len(kept)


def _pack_one(sample: Row, table: dict[tuple[int, str], int]) -> Row:
    sampled = sample["sampled_mask"]
    pairs = list(zip(sample["token_ids"], sample["token_strings"], strict=True))
    engine = [value for value, own in zip(sample["logprobs"], sampled, strict=True) if own]
    trainer = sample.get("trainer_logprobs")
    differences: dict[str, Any] = {}
    if trainer is not None:
        theirs = [value for value, own in zip(trainer, sampled, strict=True) if own]
        for at, (here, there) in enumerate(zip(engine, theirs, strict=True)):
            if there is None or here != there:
                differences[str(at)] = _number(None if there is None else there - here)
    return {
        "step": sample["step"],
        "env": str(sample.get("env", "")),
        "reward": _number(sample.get("reward")),
        "advantage": _number(sample.get("advantage")),
        "workers": sample.get("workers") or [],
        "tokens": [table.setdefault(pair, len(table)) for pair in pairs],
        "sampled": _runs(sampled),
        "roles": _runs(sample["roles"]),
        "versions": _runs(sample["versions"]),
        "logprobs": [_number(value) for value in engine],
        "differences": differences,
        "scored": trainer is not None,
    }


def _runs(values: Iterable[Any]) -> list[list[Any]]:
    """Run lengths: [value, count] pairs."""
    return [[value, len(list(group))] for value, group in groupby(values)]


def _number(value: Any) -> Any:
    """Nine digits name a float32 exactly. JSON has no NaN, and a page must not hide one."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.9g}") if math.isfinite(value) else str(value)


def _script(payload: Row) -> str:
    """JSON that can stand inside a script element whatever strings it holds."""
    text = json.dumps(payload, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
