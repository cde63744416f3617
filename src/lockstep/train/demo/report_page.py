"""`report.html`: a run as one page that opens from disk and loads nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from lockstep.dashboard.chain_view import chain_view
from lockstep.dashboard.run_view import curves, pack, shown_events
from lockstep.dashboard.static_files import shared_script, shared_style
from lockstep.run_record import Row, Run, Summary, describe, figure

SAMPLE_BYTES = 2_400_000
"""Maximum size of the samples, so that the page stays under 3 MB."""

HONEST = (
    "The starting checkpoint was first trained to solve this task, then trained for a while to "
    "show a bad habit instead. Reinforcement learning re-selects a behaviour that was suppressed "
    "on purpose. The curve shows that the machinery works from end to end; it does not show the "
    "discovery of a new skill."
)
"""A note on the bundled models, without which the curves would mislead."""

BUNDLED = ("tiny", "tiny-moe")


@dataclass(frozen=True, slots=True)
class Compared:
    """Another run whose curves are drawn beside those of a report, and where the two part."""

    name: str
    run: Run
    step: int | None
    divergence: str


def write_report(
    directory: str | Path, path: str | Path | None = None, compared: Compared | None = None
) -> Path:
    """Write the report of the run in `directory` and return its path.

        write_report("runs/reverse")

    `path` defaults to report.html in the directory. With `compared`, curves show both runs.
    """
    target = Path(path) if path is not None else Path(directory) / "report.html"
    page = render(Run.read(directory), chain_view(directory), compared)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page, "utf-8")
    return target.resolve()


def render(run: Run, chain: Row | None = None, compared: Compared | None = None) -> str:
    """Return the page. Text of the run is escaped, or embedded as JSON that is never HTML."""
    summary = run.summary()
    template = files("lockstep.train.demo").joinpath("report_page.html").read_text("utf-8")
    title = f"{task_of(run)} on {run.about.get('model', 'an unnamed model')}"
    parts = {
        "/*shared-style*/": shared_style(),
        "/*shared-script*/": shared_script(),
        "<!--title-->": escape(f"Lockstep: {title}"),
        "<!--headline-->": _headline(run, summary, title),
        "<!--tiles-->": "".join(_tiles(run, summary)),
        "<!--events-->": _events(run),
        "<!--config-->": _config(run.about),
        "<!--compared-->": _compared(compared),
        "<!--data-->": _script({**_payload(run), "chain": chain, "other": _other(compared)}),
    }
    for mark, part in parts.items():
        before, match, after = template.partition(mark)
        if not match:
            raise ValueError(f"the template has no {mark}")
        template = before + part + after
    return template


def task_of(run: Run) -> str:
    """Return the name of the task, from the configuration of the run or its samples."""
    return str(run.about.get("env") or (run.samples or [{}])[0].get("env") or "training run")


def _compared(compared: Compared | None) -> str:
    if compared is None:
        return ""
    text = (
        f"Thin lines are those of {compared.name}. The runs part at the thick line, "
        f"{compared.divergence}."
    )
    return f"<p>{escape(text)}</p>"


def _other(compared: Compared | None) -> Row | None:
    """Return the curves of the other run, and the step at which the runs part."""
    if compared is None:
        return None
    drawn = curves(compared.run)
    return {"steps": drawn["steps"], "series": drawn["series"], "parts": compared.step}


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
                    "before and after training, on held-out prompts", after > before)  # fmt: skip
    else:
        first, last = run.steps[0]["reward"], run.steps[-1]["reward"]
        yield _tile("Training reward", f"{first:.2f} → {last:.2f}", "first and last step", None)
    yield _mismatch(summary)
    yield _tile("Masked tokens", figure(100 * summary.masked) + (" %" if summary.masked else ""),
                "sampled tokens left out of the loss", summary.masked == 0)  # fmt: skip
    yield _tile("Prefix breaks", figure(summary.breaks),
                "prompts that did not extend the previous ids", summary.breaks == 0)  # fmt: skip
    served = ", ".join(sorted(set(summary.versions.values()))) or "unknown"
    yield _tile("Weights at the end", served,
                f"{'the same' if summary.agreed else 'not the same'} on "
                f"{len(summary.versions)} workers", summary.agreed)  # fmt: skip
    yield _tile("Pause per update", f"{summary.pause_seconds * 1e3:.1f} ms",
                f"median; longest {summary.longest_pause * 1e3:.1f} ms", None)  # fmt: skip
    if sent := [row for row in run.steps if "published_full_bytes" in row]:
        nbytes = sum(row["published_bytes"] for row in sent)
        full = sum(row["published_full_bytes"] for row in sent)
        yield _tile("Bytes published", f"{nbytes / 1e6:,.1f} MB",
                    f"{full / 1e6:,.1f} MB without deltas", None)  # fmt: skip
    yield _tile("Step time", f"{summary.step_seconds:.2f} s",
                "median: rollout, training and verified update", None)  # fmt: skip
    if summary.skipped:
        yield _tile("Skipped steps", figure(summary.skipped),
                    "no token to learn from: the weights did not change", None)  # fmt: skip
    yield _tile("Aborted turns", figure(summary.aborts),
                "stored with their tokens, but not trained on", None)  # fmt: skip


def _mismatch(summary: Summary) -> str:
    if summary.close_bound is not None:
        note = f"{summary.mismatch}; limit {summary.close_bound:g}"
        return _tile("Mismatch", figure(summary.max_difference), note, summary.near)
    if summary.equal:
        return _tile("Mismatch KL", "exactly 0", summary.comparison, True)
    good = summary.mismatch_kl < 1e-3
    note = f"largest of any step; {summary.comparison}"
    return _tile("Mismatch KL", figure(summary.mismatch_kl), note, good)


def _tile(name: str, value: str, note: str, good: bool | None) -> str:
    mark = {True: '<span class="mark good" title="good">✓</span>',
            False: '<span class="mark bad" title="bad">✗</span>',
            None: ""}[good]  # fmt: skip
    return (
        f'<div class="tile"><div class="name">{escape(name)}{mark}</div>'
        f'<div class="value">{escape(value)}</div><div class="note">{escape(note)}</div></div>'
    )


def _events(run: Run) -> str:
    rows = [
        f"<li><time>{float(event['time']) - run.start:.1f} s</time>{escape(describe(event))}</li>"
        for event in shown_events(run)
    ]
    return "".join(rows) or "<li>no events besides the updates</li>"


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
    names, samples, left_out = pack(run.samples, SAMPLE_BYTES)
    return {**curves(run), "names": names, "samples": samples, "left_out": left_out}


def _script(payload: Row) -> str:
    """Return JSON that is safe inside a script element, whatever strings it contains."""
    text = json.dumps(payload, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
