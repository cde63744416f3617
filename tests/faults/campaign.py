"""`python -m tests.faults.campaign`: one and two faults at once, on real processes, under load.

Each trial harms a gateway and its workers in one phase of what it does, while clients generate and
hold conversations, then ends the harm and looks: every answer is scored again on a reference engine
at the version of its label, every answered turn must be in its session, nobody may be paused past
the lease, every operation must have ended in time and told the truth about each worker, and all
workers must come back by themselves to what the fleet agreed on.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any, Literal, get_args

from lockstep.progress import Progress
from lockstep.tokens.errors import LockstepError, NotFound
from lockstep.tokens.operation import Operation
from tests.faults.cluster import ADAPTER, DECADE_HOURS, Cluster
from tests.faults.traffic import LABELS, SEQUENCES, Reference, Traffic, lost

Phase = Literal[
    "validate", "stage", "prove", "quiesce", "commit", "resume", "generate", "join",
    "session write",
]  # fmt: skip
Kind = Literal[
    "kill -9", "SIGSTOP", "delay", "200 with error", "disk full", "corrupt file",
    "second gateway", "clock jump", "gateway kill",
]  # fmt: skip
METHODS: dict[Phase, str] = {
    "stage": "stage", "prove": "probe", "quiesce": "pause_generation", "commit": "commit",
    "resume": "resume_generation", "generate": "generate", "join": "liveness_probe",
    "session write": "generate",
}  # fmt: skip
"""The call at a worker in which each phase is struck; the gateway validates by itself."""
OPERATION_SECONDS = 30.0
"""More than all phases of the gateway's budgets together that one worker can use up."""
HEAL_SECONDS = 40.0
LEASE_SECONDS = 2.0
STOP_SECONDS = 4.0


@dataclass(frozen=True)
class Fault:
    kind: Kind
    phase: Phase
    worker: int

    def __str__(self) -> str:
        return f"{self.kind} of w{self.worker} in {self.phase}"


@dataclass
class Trial:
    """What was done, and what was wrong afterwards."""

    number: int
    size: int
    faults: tuple[Fault, ...]
    struck: list[Fault] = field(default_factory=list)
    outcome: str = "none"
    seconds: float = 0.0
    heal_seconds: float = 0.0
    answers: int = 0
    turns: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)


@dataclass
class Campaign:
    reference: Reference
    rng: random.Random
    trials: list[Trial] = field(default_factory=list)
    quiet: bool = False

    async def run(self, sizes: tuple[int, ...], seconds: float, directory: Path) -> None:
        """Trials on each size of fleet, for its share of the time; at least one."""
        begun = monotonic()
        with Progress("Faults", seconds, visible=not self.quiet) as progress:
            for size in sizes:
                progress.say(f"{size} workers")
                async with Cluster(
                    size, directory / f"fleet-{size}", self.reference.adapter
                ) as cluster:
                    until = monotonic() + seconds / len(sizes)
                    while True:
                        await self._trial(cluster)
                        progress.reach(min(round(monotonic() - begun), seconds))
                        if monotonic() > until:
                            break

    def _draw(self, size: int) -> tuple[Fault, ...]:
        """Every pair of phase and kind comes up once before any does again."""
        tried = Counter((f.phase, f.kind) for trial in self.trials for f in trial.faults[:1])
        kinds = get_args(Kind)
        pairs = [(phase, kind) for phase in get_args(Phase) for kind in kinds]
        fewest = min(tried[pair] for pair in pairs)
        phase, kind = self.rng.choice([pair for pair in pairs if tried[pair] == fewest])
        faults = [Fault(kind, phase, self.rng.randrange(size))]
        if self.rng.random() < 0.5:
            second = self.rng.choice([each for each in kinds if each != kind])
            where = phase if self.rng.random() < 0.5 else self.rng.choice(get_args(Phase))
            faults.append(Fault(second, where, self.rng.randrange(size)))
        return tuple(faults)

    async def _trial(self, cluster: Cluster) -> None:
        trial = Trial(len(self.trials), cluster.count, self._draw(cluster.count))
        self.trials.append(trial)
        begun = monotonic()
        async with cluster.fleet() as fleet:
            before = (await fleet.state())["version"]
        aim = self.rng.choice([label for label in LABELS if label != before])
        traffic = Traffic(
            cluster.gateway.url,
            f"trial-{trial.number}",
            adapted=1,
            blame_adapters=all(fault.kind != "second gateway" for fault in trial.faults),
        )
        incarnations = [worker.process.pid for worker in cluster.workers]
        async with traffic:
            await asyncio.sleep(0.2)
            harm = _Harm(cluster, trial, self.reference.paths[aim], self._elsewhere(before, aim))
            operation = await self._operate(cluster, trial, harm, aim)
            await asyncio.sleep(0.5)  # for faults that wait for the next request
            await harm.over()
            await cluster.heal()
            healing = monotonic()
            await self._healed(cluster, trial)
            trial.heal_seconds = monotonic() - healing
        harmless = not cluster.restarts and not trial_kills(trial)
        if operation is not None and harmless:
            same = [
                w.process.pid == pid for w, pid in zip(cluster.workers, incarnations, strict=True)
            ]
            await self._true(cluster, trial, operation, before, aim, same)
        cluster.restarts = 0
        await self._look(cluster, trial)
        await self._judge(cluster, trial, traffic)
        trial.seconds = monotonic() - begun
        if not self.quiet:
            faults = " and ".join(map(str, trial.faults))
            wrong = f"  WRONG: {'; '.join(trial.wrong)}" if trial.wrong else ""
            print(
                f"{trial.number:4} fleet of {trial.size}: {faults}: {trial.outcome}, healed in "
                f"{trial.heal_seconds:.1f} s, {trial.answers} answers, {trial.turns} turns, "
                f"{trial.refused} refused{wrong}", flush=True,
            )  # fmt: skip

    def _elsewhere(self, before: str | None, aim: str) -> tuple[Path, str]:
        """What a second gateway would bring the workers to."""
        label = next(label for label in (*LABELS, *LABELS) if label != aim)
        return self.reference.paths[label], label

    async def _operate(
        self, cluster: Cluster, trial: Trial, harm: _Harm, aim: str
    ) -> Operation | None:
        """An update under harm; and, where the phase is no part of one, what has that phase."""
        phases = {fault.phase for fault in trial.faults}
        pause = self.rng.random() < 0.25
        await harm.begin()
        if "join" in phases:
            joining = next(fault.worker for fault in trial.faults if fault.phase == "join")
            cluster.kill(joining)
            await cluster.restart_worker(joining)
            await asyncio.sleep(0.5)
        begun = monotonic()
        try:
            async with asyncio.timeout(OPERATION_SECONDS), cluster.fleet() as fleet:
                if pause:
                    await fleet.pause("keep", lease_seconds=LEASE_SECONDS)
                operation = await fleet.update_weights(self.reference.paths[aim], aim)
        except TimeoutError:
            trial.wrong.append(f"the operation had not ended after {OPERATION_SECONDS:g} s")
            trial.outcome = "hung"
            return None
        except LockstepError as error:
            trial.outcome = error.code
            return error.operation
        except Exception as error:  # the gateway died under it: nobody knows, and nobody says
            trial.outcome = type(error).__name__
            return None
        trial.outcome = f"done in {monotonic() - begun:.1f} s"
        return operation

    async def _healed(self, cluster: Cluster, trial: Trial) -> None:
        """All workers serve, unpaused, without anybody's help."""
        deadline = monotonic() + HEAL_SECONDS
        state: dict[str, Any] = {}
        while monotonic() < deadline:
            try:
                async with asyncio.timeout(5), cluster.fleet() as fleet:
                    state = await fleet.state()
            except (LockstepError, TimeoutError):
                state = {}
            if state.get("serving") == cluster.count and state["paused"] is None:
                return
            await asyncio.sleep(0.2)
        rows = [f"{w['id']} {w['state']} ({w['reason']})" for w in state.get("workers", ())]
        trial.wrong.append(
            f"not healed after {HEAL_SECONDS:g} s: paused {state.get('paused')}, {rows}"
        )

    async def _true(
        self,
        cluster: Cluster,
        trial: Trial,
        operation: Operation,
        before: str | None,
        aim: str,
        same: list[bool],
    ) -> None:
        """The operation says of the fleet and of each worker what is so."""
        async with cluster.fleet() as fleet:
            state = await fleet.state()
            kept = await fleet.operation(operation.id)
        expected = aim if operation.status == "done" else before
        if state["version"] != expected:
            trial.wrong.append(
                f"the update is {operation.status}, and the version {state['version']!r}"
            )
        if kept.status != operation.status:
            trial.wrong.append(f"it was told {operation.status} and recorded as {kept.status}")
        names = {row["id"]: index for index, row in enumerate(state["workers"])}
        for name, result in operation.workers.items():
            if result.status in ("ok", "rolled_back") and same[names[name]]:
                label = aim if result.status == "ok" and operation.status == "done" else before
                _, view = await cluster.workers[names[name]].control("liveness_probe")
                if view["version"] != label:
                    trial.wrong.append(f"{name} is {result.status} and serves {view['version']!r}")

    async def _look(self, cluster: Cluster, trial: Trial) -> None:
        """Every worker holds what the fleet agreed on, by its scores, and generates."""
        async with cluster.fleet() as fleet:
            version = (await fleet.state())["version"]
        for index, worker in enumerate(cluster.workers):
            _, body = await worker.control("probe", token_ids=[list(ids) for ids in SEQUENCES])
            held = self.reference.held(body["logprobs"])
            _, view = await worker.control("liveness_probe")
            if (held, view["version"]) != (version, version):
                trial.wrong.append(
                    f"w{index} holds {held!r} as {view['version']!r}, agreed is {version!r}"
                )
            labels = {ADAPTER: self.reference.adapter_label}
            if view["adapter_labels"] != labels:
                trial.wrong.append(
                    f"w{index} holds adapters {view['adapter_labels']}, not {labels}"
                )
            if view["state"] != "running":
                trial.wrong.append(f"w{index} is {view['state']} after the lease")

    async def _judge(self, cluster: Cluster, trial: Trial, traffic: Traffic) -> None:
        """Scores every answer again, and looks every answered turn up."""
        trial.answers, trial.refused = len(traffic.answers), traffic.refused
        trial.wrong += sorted(set(traffic.blamed))[:3]
        judged: list[Any] = list(traffic.answers)
        async with cluster.fleet() as fleet:
            for name, turns in traffic.turns.items():
                trial.turns += len(turns)
                try:
                    samples = await fleet.samples(name)
                except NotFound:
                    trial.wrong.append(f"session {name} with {len(turns)} turns is lost")
                    continue
                if gone := lost(turns, samples):
                    trial.wrong.append(f"{len(gone)} answered turns of session {name} are lost")
                judged += samples
                await fleet.end_session(name)
        for answer in judged:
            if (why := await asyncio.to_thread(self.reference.wrong, answer)) is not None:
                trial.wrong.append(why)

    def table(self) -> str:
        """Markdown: how many faults of each kind struck in each phase, and what came of it."""
        count = Counter(
            pair for trial in self.trials for pair in {(f.phase, f.kind) for f in trial.struck}
        )
        kinds = get_args(Kind)
        rows = ["| phase | " + " | ".join(kinds) + " |", "|---|" + "---|" * len(kinds)]
        for phase in get_args(Phase):
            cells = [str(count[phase, kind]) for kind in kinds]
            rows.append(f"| {phase} | " + " | ".join(cells) + " |")
        wrong = sum(bool(trial.wrong) for trial in self.trials)
        outcomes = Counter(trial.outcome.split(" in ")[0] for trial in self.trials)
        ends = ", ".join(f"{count} {name}" for name, count in outcomes.most_common())
        sizes = Counter(trial.size for trial in self.trials)
        fleets = ", ".join(f"{count} on fleets of {size}" for size, count in sorted(sizes.items()))
        double = sum(len(trial.faults) > 1 for trial in self.trials)
        healing = max((trial.heal_seconds for trial in self.trials), default=0.0)
        answers = sum(trial.answers for trial in self.trials)
        turns = sum(trial.turns for trial in self.trials)
        rows += [
            "",
            f"{len(self.trials)} trials ({fleets}; {double} with two faults at once): updates "
            f"ended {ends}. {answers} answers and {turns} turns of sessions were scored again, "
            f"{sum(trial.refused for trial in self.trials)} requests were refused with an error. "
            f"All was well again within {healing:.1f} s. **{wrong} trials with a violation.**",
        ]
        return "\n".join(rows)


def trial_kills(trial: Trial) -> bool:
    """Whether what an operation said may have become untrue since, by the harm itself."""
    return any(f.kind in ("gateway kill", "second gateway") for f in trial.faults)


class _Harm:
    """The faults of one trial: each waits for its phase, strikes once, and ends by itself."""

    def __init__(
        self, cluster: Cluster, trial: Trial, checkpoint: Path, elsewhere: tuple[Path, str]
    ) -> None:
        self._cluster = cluster
        self._trial = trial
        self._checkpoint = checkpoint
        self._elsewhere = elsewhere
        self._tasks: list[asyncio.Task[None]] = []
        self._over = False

    async def begin(self) -> None:
        """Those that strike in a call wait at the worker's proxy; the others strike now.

        Nobody knows which worker gets the next request: there the first that does is struck.
        """
        for fault in self._trial.faults:
            method = METHODS.get(fault.phase)
            if method is None:
                await self._strike(fault)
                continue
            anywhere = range(self._cluster.count) if method == "generate" else (fault.worker,)
            for index in anywhere:
                self._wait_for(method, replace(fault, worker=index))

    def _wait_for(self, method: str, fault: Fault) -> None:
        injector = self._cluster.injectors[fault.worker]
        number = injector.calls[method] + 1
        if fault.kind == "200 with error":
            injector.also(method, "error", number=number, count=2)
            self._trial.struck.append(fault)
        else:
            injector.also(method, "hook before", number=number, hook=self._hook(fault))

    def _hook(self, fault: Fault) -> Callable[[], Awaitable[None]]:
        async def hook() -> None:
            same = (fault.kind, fault.phase)
            if same not in [(other.kind, other.phase) for other in self._trial.struck]:
                await self._strike(fault)

        return hook

    async def _strike(self, fault: Fault) -> None:
        cluster = self._cluster
        if self._over:
            return
        self._trial.struck.append(fault)
        match fault.kind:
            case "kill -9":
                cluster.kill(fault.worker)
            case "SIGSTOP":
                cluster.stop(fault.worker)
                self._later(STOP_SECONDS, lambda: cluster.proceed(fault.worker))
            case "delay":
                await asyncio.sleep(2.5)
            case "disk full":
                cluster.gateway.fill_disk(True)
                self._later(3.0, lambda: cluster.gateway.fill_disk(False))
            case "corrupt file":
                cluster.spoil(self._checkpoint)
            case "second gateway":
                cluster.second_gateway(*self._elsewhere)
                self._later(6.0, lambda: None)
            case "clock jump":
                hours = 28 if self._trial.number % 2 else DECADE_HOURS
                cluster.gateway.jump(hours if fault.worker % 2 else -hours)
            case "gateway kill":
                cluster.gateway.kill()
            case "200 with error":  # in validation no worker says anything
                cluster.injectors[fault.worker].also("stage", "error", number=1, count=2)

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        async def wait() -> None:
            await asyncio.sleep(seconds)
            call()

        self._tasks.append(asyncio.create_task(wait()))

    async def over(self) -> None:
        """Returns when every fault has ended that ends by itself."""
        self._over = True
        await asyncio.gather(*self._tasks)


async def campaign(
    seconds: float, seed: int, sizes: tuple[int, ...], *, quiet: bool = False
) -> Campaign:
    """Runs it in a directory of its own; told to end, it leaves no process behind."""
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with tempfile.TemporaryDirectory() as directory:
        made = Campaign(
            Reference(Path(directory) / "checkpoints"), random.Random(seed), quiet=quiet
        )
        await made.run(sizes, seconds, Path(directory))
        return made


def main() -> int:
    parser = argparse.ArgumentParser(description="Faults on real processes, under load.")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4])
    arguments = parser.parse_args()
    seed = random.randrange(1 << 30) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    made = asyncio.run(campaign(arguments.seconds, seed, tuple(arguments.sizes)))
    print(f"\nseed {seed}, {arguments.seconds:g} s\n\n{made.table()}")
    return 1 if any(trial.wrong for trial in made.trials) else 0


if __name__ == "__main__":
    sys.exit(main())
