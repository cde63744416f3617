"""The run directory: metrics, samples, events, checkpoints, and the state to resume from.

run.json  metrics.jsonl  samples.jsonl  events.jsonl
checkpoints/step-N/     weights or adapter, probe, manifest, STABLE
state/step-N.pt         the trainer's state besides the weights; written before STABLE
state/step-N.rank-R.pt  the same of rank R, where several ranks train
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from time import time
from typing import Any

from lockstep.checkpoint.files import write_whole
from lockstep.checkpoint.manifest import Manifest, check_stable
from lockstep.run_record import EVENTS, METRICS, RUN, SAMPLES
from lockstep.tokens.errors import CheckpointError, Conflict
from lockstep.train.records.state_files import (
    WHOLE,
    Share,
    is_whole,
    read_state,
    remove_state,
    write_state,
)

_STEP = re.compile(r"step-(\d+)")


class RunDirectory:
    """The files of one run. Each line is appended by one write."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).resolve()
        self.checkpoints = self.path / "checkpoints"
        self._states = self.path / "state"

    def start(self) -> None:
        """Create the directory. Raises Conflict when it holds a run, which is never overwritten."""
        if (self.path / RUN).exists() or (self.path / METRICS).exists():
            raise Conflict(
                f"{self.path} already holds a run: resume it (--resume), or choose another run_dir",
                param="run_dir",
            )
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self._states.mkdir(exist_ok=True)

    # Metrics, samples and events

    def metrics(self, line: dict[str, Any]) -> None:
        self._append(METRICS, line)

    def samples(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            self._append(SAMPLES, line)

    def event(self, kind: str, **more: Any) -> None:
        self._append(EVENTS, {"time": time(), "kind": kind, **more})

    def write_run(self, **more: Any) -> None:
        """Add fields to run.json."""
        write_whole(self.path / RUN, json.dumps({**self.run(), **more}, indent=1).encode())

    def run(self) -> dict[str, Any]:
        path = self.path / RUN
        values: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
        return values

    def _append(self, name: str, line: dict[str, Any]) -> None:
        with open(self.path / name, "a") as file:
            file.write(json.dumps(line) + "\n")

    # Resuming

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step}"

    def save_state(self, step: int, state: dict[str, Any], share: Share = WHOLE) -> None:
        """Write the state, or one rank's part of it. Call it before the checkpoint is stable: a
        crash must not separate them.

        Raises OSError when the disk is full.
        """
        write_state(self._states, step, state, share)

    def load_state(self, step: int, share: Share = WHOLE) -> dict[str, Any]:
        """Return the state, or one rank's part of it, whatever number of ranks wrote it."""
        return read_state(self._states, step, share)

    def last_step(self, recorded: int | None = None) -> int | None:
        """Return the newest step with a stable checkpoint and state; None when there is none.

        Both are read in full: after a power cut a file may be incomplete. Steps after `recorded`,
        the last step in the chain, do not count.
        """
        for step in sorted(self.steps(), reverse=True):
            if recorded is not None and step > recorded:
                continue
            directory = self.checkpoint(step)
            try:
                manifest = Manifest.read(directory)
                check_stable(directory, manifest)
                if manifest is None:
                    continue
                manifest.check(directory, hashes=True)
            except CheckpointError:
                continue
            if is_whole(self._states, step):
                return step
        return None

    def rewind(self, step: int) -> bool:
        """Delete what was written after `step`; return whether the metrics of `step` exist."""
        steps = self._cut(METRICS, step)
        self._cut(SAMPLES, step)
        for later in self.steps():
            if later > step:
                shutil.rmtree(self.checkpoint(later))
                remove_state(self._states, later)
        return step in steps

    def _cut(self, name: str, step: int) -> set[int]:
        """Drop the lines after `step` and an incomplete last line; return the steps that remain."""
        path = self.path / name
        lines, steps = [], set()
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                at = int(json.loads(line)["step"])
            except (ValueError, KeyError):
                continue
            if at <= step:
                lines.append(line)
                steps.add(at)
        if path.exists():
            write_whole(path, "".join(line + "\n" for line in lines).encode())
        return steps

    def prune(self, keep: int) -> None:
        """Delete all but the newest `keep` checkpoints."""
        for step in sorted(self.steps())[:-keep]:
            shutil.rmtree(self.checkpoint(step))
            remove_state(self._states, step)

    def steps(self) -> list[int]:
        """Return the steps with a checkpoint."""
        if not self.checkpoints.is_dir():
            return []
        matches = (_STEP.fullmatch(path.name) for path in self.checkpoints.iterdir())
        return [int(match[1]) for match in matches if match]
