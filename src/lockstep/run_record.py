"""Reader of a run directory: steps, samples, events, and a summary of them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from lockstep.tokens.errors import BadRequest, NotFound

METRICS, SAMPLES, EVENTS, RUN = "metrics.jsonl", "samples.jsonl", "events.jsonl", "run.json"
AUDITS = "audits.jsonl"
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Summary:
    """Outcome of a run. Counts are totals over all steps, and most durations are medians."""

    reward_before: float | None
    reward_after: float | None
    mismatch_kl: float
    """Maximum over the steps."""
    max_difference: float
    """Largest difference between a trainer logprob and the engine's, over all steps."""
    compared: int | None
    """Number of sampled tokens whose logprobs were compared; None for a run of an older version."""
    unequal: int
    """Number of them whose logprob differed."""
    close_bound: float | None
    """Allowed difference of a run in close mode; None for an exact run."""
    close_reason: str
    masked: float
    """Largest share of masked tokens of any step."""
    breaks: int
    aborts: int
    skipped: int
    """Number of steps without a token to train on."""
    versions: dict[str, str]
    """Weight version that each worker served at the end."""
    pause_seconds: float
    longest_pause: float
    step_seconds: float
    tokens: int
    seconds: float

    @property
    def agreed(self) -> bool:
        """Whether there are workers and all serve one version."""
        return len(set(self.versions.values())) == 1

    @property
    def kept(self) -> bool:
        """Whether trainer and engine stayed in lockstep: nothing differed, broke or was masked.

        In close mode, logprobs may differ within the bound of `lockstep.train.learning.exactness`.
        """
        return self.near and self.masked == 0 and self.breaks == 0 and self.agreed

    @property
    def near(self) -> bool:
        """Whether the trainer's logprobs equalled the engine's: bit for bit, or within the
        bound.
        """
        if self.close_bound is None:
            return self.equal
        return self.max_difference <= self.close_bound

    @property
    def equal(self) -> bool:
        """Whether every logprob of the trainer was the engine's, bit for bit.

        Counted token by token: a mean can be rounded to 0. Runs of older versions have no count.
        """
        if self.compared is None:
            return self.mismatch_kl == 0 and self.max_difference == 0
        return self.unequal == 0

    @property
    def comparison(self) -> str:
        """Number of tokens compared, and how many differed."""
        if self.compared is None:
            return "bit for bit" if self.equal else "largest of any step"
        if self.unequal:
            return f"{self.unequal:,} of {self.compared:,} tokens differ"
        return f"all {self.compared:,} tokens bit for bit"

    @property
    def mismatch(self) -> str:
        """Comparison of trainer and engine in words that never call a small number zero."""
        if self.close_bound is not None:
            return f"close: max |Δ| {self.max_difference:.1e} because {self.close_reason}"
        value = "exactly 0" if self.equal else figure(self.mismatch_kl)
        return f"{value}, {self.comparison}"


@dataclass(frozen=True, slots=True)
class Run:
    """Contents of a run directory."""

    about: Row
    steps: list[Row]
    samples: list[Row]
    events: list[Row]

    @classmethod
    def read(cls, directory: str | Path) -> Run:
        """Read a run directory. Raises NotFound without a run, BadRequest for a line that is not
        JSON.
        """
        directory = Path(directory)
        if not (directory / METRICS).is_file():
            raise NotFound(
                f"{directory} has no {METRICS}: expected the directory that a training run wrote"
            )
        about = directory / RUN
        return cls(
            about=json.loads(about.read_text("utf-8")) if about.is_file() else {},
            steps=_lines(directory / METRICS),
            samples=_lines(directory / SAMPLES),
            events=sorted(_lines(directory / EVENTS), key=lambda event: float(event["time"])),
        )

    @property
    def start(self) -> float:
        """Start time in seconds of the epoch; 0 if it was not recorded."""
        first = self.events[0]["time"] if self.events else 0.0
        return float(self.about.get("started") or first)

    def ends(self) -> list[float]:
        """End of each step (its update), in seconds after the start."""
        updates = {
            event["step"]: float(event["time"]) - self.start
            for event in self.events
            if event["kind"] == "update"
        }
        at, ends = 0.0, []
        for step in self.steps:
            at = updates.get(step["step"], at + float(step["time/step"]))
            ends.append(at)
        return ends

    def summary(self) -> Summary:
        """Summarise the run. Raises BadRequest for a run without a step."""
        if not self.steps:
            raise BadRequest("this run has no steps yet: a report needs at least one")
        steps, ended = self.steps, self.about.get("ended")
        before, after = self.about.get("before") or {}, self.about.get("after") or {}
        numerics = self.about.get("numerics") or {}
        pauses = [float(step["pause_seconds"]) for step in steps]
        return Summary(
            reward_before=before.get("reward"),
            reward_after=after.get("reward"),
            mismatch_kl=max(float(step["mismatch_kl"]) for step in steps),
            max_difference=max(float(step.get("mismatch_max", 0.0)) for step in steps),
            compared=_total(steps, "compared_logprobs"),
            unequal=_total(steps, "unequal_logprobs") or 0,
            close_bound=float(numerics["bound"]) if numerics.get("mode") == "close" else None,
            close_reason=str(numerics.get("reason", "")),
            masked=max(float(step["is_masked"]) for step in steps),
            breaks=sum(int(step["breaks"]) for step in steps),
            aborts=sum(int(step["aborts"]) for step in steps),
            skipped=sum(int(step.get("skipped", 0)) for step in steps),
            versions=self.about.get("versions")
            or {worker["id"]: worker["version"] for worker in steps[-1].get("workers", ())},
            pause_seconds=median(pauses),
            longest_pause=max(pauses),
            step_seconds=median(float(step["time/step"]) for step in steps),
            tokens=sum(int(step["tokens"]) for step in steps),
            seconds=self.ends()[-1] if ended is None else float(ended) - self.start,
        )


def _total(steps: list[Row], name: str) -> int | None:
    """Return the sum of a count over the steps; None if a step lacks it."""
    counts = [step.get(name) for step in steps]
    return None if None in counts else sum(int(count or 0) for count in counts)


def describe(event: Row) -> str:
    """Return an event as a sentence."""
    worker, version = event.get("worker"), event.get("version")
    match event["kind"]:
        case "worker_killed":
            return f"worker {worker} is killed (SIGKILL to process {event.get('pid')})"
        case "worker_lost":
            return f"worker {worker} gets no more requests: it does not answer"
        case "worker_back":
            return f"worker {worker} is back, proved at version {version}"
        case "numerics" if event["mode"] == "exact":
            return "exact: trainer and workers compute the same bits"
        case "numerics":
            return f"close: logprobs may differ in their last bits, because {event['reason']}"
        case "skipped":
            return f"step {event['step']} is skipped: {event['reason']}"
        case "explanation":
            return f"the mismatch of step {event['step']}: {event['sentence']}"
        case "eval":
            how = f"reward {event['reward']:.3f}, solved {event['solved']:.0%}"
            return f"{event['prompts']} held-out prompts after step {event['step']}: {how}"
    rest = {key: value for key, value in event.items() if key not in ("time", "kind")}
    details = ", ".join(f"{key} {value}" for key, value in rest.items() if value is not None)
    return f"{event['kind'].replace('_', ' ')}{': ' if details else ''}{details}"


def figure(value: float) -> str:
    """Format a number for people: 0 means exactly 0, and no small number looks like it."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) < 1e-3:
        return f"{value:.2e}"
    return f"{value:.3g}" if abs(value) < 1e3 else f"{value:,.0f}"


def lanes(run: Run) -> list[Row]:
    """Return for each worker its time spans, in seconds after the start: serving, or down."""
    ids = {worker["id"] for step in run.steps for worker in step.get("workers", ())}
    last = [float(event["time"]) - run.start for event in run.events[-1:]]
    until = max([run.summary().seconds, *run.ends(), *last])
    rows = []
    for worker in sorted(ids | {event["worker"] for event in run.events if "worker" in event}):
        marks = [(0.0, "serving")]
        for event in run.events:
            if event.get("worker") == worker:
                at = float(event["time"]) - run.start
                if event["kind"] in ("worker_killed", "worker_lost", "worker_back"):
                    state = "serving" if event["kind"] == "worker_back" else "down"
                    if state != marks[-1][1]:  # a death is recorded twice: killed, then missed
                        marks.append((at, state))
        spans = [
            {"from": begin, "to": end, "state": state}
            for (begin, state), (end, _) in pairwise([*marks, (until, "")])
            if end > begin
        ]
        rows.append({"id": worker, "spans": spans})
    return rows


def _lines(path: Path) -> list[Row]:
    """Return the objects of a JSONL file; none if it is missing.

    A killed trainer may leave an incomplete last line, which is not part of the run.
    """
    if not path.is_file():
        return []
    rows = []
    text = path.read_text("utf-8")
    for number, line in enumerate(text[: text.rfind("\n") + 1].split("\n")[:-1], start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise BadRequest(f"line {number} of {path} is not JSON: {error}") from None
    return rows
