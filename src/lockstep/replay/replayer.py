"""Repeats recorded steps: learns from the recorded samples again and compares what comes out."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace as with_
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lockstep.chain.records import Record
from lockstep.engine.numerics.plan import fingerprint
from lockstep.models import model_directory
from lockstep.replay.comparison import compare_step, compare_tensors
from lockstep.replay.draws import DrawSampler, is_chosen
from lockstep.replay.findings import Replay, ReplayDifference
from lockstep.replay.rewards import Rewards
from lockstep.replay.sources import RunSource, open_run
from lockstep.replay.verification import missing_links
from lockstep.tokens.errors import BadRequest
from lockstep.tokens.numerics import NumericsPlan
from lockstep.train.learning.batch import Clock, make_batch
from lockstep.train.learning.exactness import CLOSE_BOUND
from lockstep.train.learning.learner import Learner, own_plan
from lockstep.train.records.chain_recorder import code_version, model_files
from lockstep.train.records.run_dir import RunDirectory
from lockstep.train.records.step_contents import decode_groups, decode_teacher_tops
from lockstep.train.records.tensor_digests import Digests, TensorDigests

T = TypeVar("T")
OnStep = Callable[[int], None]


async def replay(
    run: str | Path,
    *,
    first: int | None = None,
    last: int | None = None,
    steps: Collection[int] | None = None,
    fresh_rollouts: bool = False,
    share_of_draws: float = 1.0,
    seed: int = 0,
    model: str | None = None,
    trust_code: bool = False,
    on_step: OnStep | None = None,
) -> Replay:
    """Repeat the steps of a run from `first` to `last` and compare them with their records.

        outcome = await replay("runs/calc", first=5, last=8, fresh_rollouts=True)
        assert outcome.held, outcome.differences

    `run` is a run directory or a pack. Steps before `first` that no kept checkpoint covers are
    repeated as well; with `steps`, only these are compared. With `fresh_rollouts`, draws are
    sampled again from their seeds and weights: all of them, or a share that `seed` chooses. `model`
    replaces the model that training started from, where it is at another place here. The
    environment of a pack is another author's code, which runs only with `trust_code`.

    Raises NotFound without a chain, and BadRequest for steps that were not recorded and for records
    that are missing, altered or incomplete.
    """
    with open_run(run, model=model, trust_code=trust_code) as source:
        draws = partial(is_chosen, share=share_of_draws, seed=seed) if fresh_rollouts else None
        return await _Replayer(source, draws, on_step).run(first, last, steps)


class _Replayer:
    def __init__(
        self, source: RunSource, choose: Callable[..., bool] | None, on_step: OnStep | None
    ) -> None:
        self._source = source
        self._chain = chain = source.chain
        self._choose = choose
        self._on_step = on_step
        self._directory = RunDirectory(chain.directory)
        if missing := missing_links(chain):
            writer = chain.start.get("writer", "another program")
            raise BadRequest(
                f"{source.name} cannot be repeated: its records, written by {writer}, lack "
                f"{', '.join(missing)}; `lockstep audit --chain-only` checks what they have",
                param="run",
            )
        self._config = source.config(chain.start)
        self._environment = source.environment(self._config)
        self._outcome = Replay(source.name)
        # Torch runs in one thread, so that the event loop serves the engine's requests.
        self._torch = ThreadPoolExecutor(1, thread_name_prefix="replay")
        self._steps_of_labels = {
            update["label"]: update["step"]
            for link in chain.links
            for update in link.record.get("updates", ())
        }

    async def run(
        self, first: int | None, last: int | None, only: Collection[int] | None
    ) -> Replay:
        steps, outcome = self._chain.steps, self._outcome
        if not steps:
            raise BadRequest("the run has no recorded step yet", param="run")
        if only:
            first, last = min(only), max(only)
        outcome.first = min(steps) if first is None else first
        outcome.last = max(steps) if last is None else last
        span = set(range(outcome.first, outcome.last + 1))
        self._compared = span if only is None else set(only)
        if not self._compared or not {outcome.first, outcome.last} | self._compared <= set(steps):
            raise BadRequest(
                f"steps {outcome.first}..{outcome.last} are not recorded: the run has steps "
                f"{min(steps)} to {max(steps)}",
                param="steps",
            )
        outcome.differences += [
            ReplayDifference(0, "chain", "", "whole", why) for why in self._chain.breaks
        ]
        try:
            await self._compare_arithmetic()
            self._compare_inputs()
            with tempfile.TemporaryDirectory(prefix="lockstep-replay-") as scratch:
                await self._repeat(Path(scratch))
        finally:
            self._torch.shutdown()
        return outcome

    # Before the first step

    async def _compare_arithmetic(self) -> None:
        """Decide whether this machine computes the bits of the recorded ones."""
        own = await self._in_thread(own_plan, self._config)
        for link in self._chain.links:
            if link.kind in ("start", "resume") and link.step < self._outcome.last:
                self._compare_plan(link.record["arithmetic"], own)

    def _compare_plan(self, recorded: Mapping[str, Any], own: NumericsPlan) -> None:
        outcome, plan = self._outcome, NumericsPlan(**recorded["trainer"])
        why = plan.mismatch(own)
        # A close trainer repeats its own bits on the machine and libraries that it ran on.
        same = plan.to_json() == own.to_json() and recorded["machine"] == fingerprint()
        if why is not None and not same:
            outcome.mode, outcome.reason = "band", why
        elif not plan.is_exact:
            outcome.note(f"The run was close ({plan.reason}), on a machine like this one.")

    def _compare_inputs(self) -> None:
        """Compare model files and code with the recorded ones."""
        start, outcome = self._chain.start, self._outcome
        files = model_files(self._config.model)
        for name, digest in start["model"].items():
            if name in files or name not in self._source.left_out:
                outcome.compare(0, "model file", digest[:16], files.get(name, "")[:16], name)
            else:
                outcome.note(f"The model's file {name} was not packed, and is not compared.")
        here = code_version(self._environment)
        for name, value in start["code"].items():
            if name == "environment" and self._environment is None:
                continue
            if (own := here.get(name)) != value:
                outcome.note(f"The code differs: {name} was {str(value)[:16]}, "
                             f"here {str(own)[:16]}.")  # fmt: skip

    # Steps

    async def _repeat(self, scratch: Path) -> None:
        outcome, steps = self._outcome, self._chain.steps
        base = self._base()
        learner = await self._in_thread(self._open, base)
        directories = {base: scratch / f"step-{base}"}
        digests = await self._in_thread(self._save, learner, directories[base])
        self._compare_base(base, digests)
        rewards = Rewards(self._config, self._environment)
        async with AsyncExitStack() as stack:
            draws = await self._open_draws(stack)
            for step in range(base + 1, outcome.last + 1):
                if step not in steps:
                    raise BadRequest(
                        f"step {step} has no record: the run cannot be repeated past it"
                    )
                learner = await self._changed(learner, step, directories)
                record = steps[step]
                contents = self._chain.contents(record["file"])
                groups = decode_groups(contents)
                if step in self._compared:
                    await rewards.check(step, contents, groups, outcome)
                    if draws is not None:
                        await draws.check(step, groups, self._by_label(directories), outcome)
                directories[step] = scratch / f"step-{step}"
                await self._in_thread(
                    self._learn, learner, record, contents, groups, directories[step]
                )
                if step in self._compared:
                    outcome.steps.append(step)
                self._drop_unused(directories, step)
                if self._on_step is not None:
                    self._on_step(step)

    def _by_label(self, directories: Mapping[int, Path]) -> dict[str, Path]:
        labels = self._steps_of_labels
        return {label: directories[at] for label, at in labels.items() if at in directories}

    @property
    def _sampled(self) -> set[int]:
        """The steps whose draws are sampled again."""
        return self._compared if self._choose is not None else set()

    def _base(self) -> int:
        """Return the step to start from: the newest kept one that covers all needed versions."""
        steps = self._chain.steps
        needed = [
            self._steps_of_labels[label]
            for step in self._sampled
            for label in steps[step]["samples"]["tokens_by_version"]
            if label in self._steps_of_labels
        ]
        newest = min([self._outcome.first - 1, *needed])
        start = int(self._chain.start["step"])
        readable = self._source.reads_checkpoints
        usable = self._directory.last_step(newest) if readable else None
        if usable is not None and usable > start:
            return usable
        if start and usable != start:
            raise BadRequest(
                f"the chain starts at step {start}, whose checkpoint was deleted: repeat a later "
                "step whose checkpoint is kept (loop.keep_checkpoints)",
                param="steps",
            )
        return start

    def _open(self, base: int) -> Learner:
        """Create the learner as it was after step `base`."""
        exact = self._chain.start["arithmetic"]["mode"] == "exact"
        config = self._config
        for link in self._chain.links:
            if link.kind == "resume" and link.step < base:
                config = self._source.config(link.record)
        self._config = config
        if not base:
            return Learner(config, exact=exact)
        learner = Learner(config, exact=exact, weights=self._directory.checkpoint(base))
        learner.load_state(self._directory.load_state(base))
        return learner

    async def _changed(
        self, learner: Learner, step: int, directories: Mapping[int, Path]
    ) -> Learner:
        """Return the learner of a run that was resumed before `step` with another configuration."""
        for link in self._chain.links:
            if link.kind == "resume" and link.step == step - 1 and link.record["changes"]:
                self._config = self._source.config(link.record)
                learner = await self._in_thread(self._reopen, learner, directories[step - 1])
        return learner

    def _reopen(self, learner: Learner, weights: Path) -> Learner:
        opened = Learner(self._config, exact=learner.exact, weights=weights)
        opened.load_state(learner.state())
        return opened

    def _compare_base(self, base: int, digests: Digests) -> None:
        recorded = self._recorded_tensors(base)
        if self._outcome.mode == "bits" or base:
            compare_tensors(self._outcome, base, recorded["weights"], digests["weights"], "weights")

    def _recorded_tensors(self, step: int) -> Digests:
        start, steps = self._chain.start, self._chain.steps
        file = start["tensors"] if step == start["step"] else steps[step]["learning"]["tensors"]
        digests: Digests = self._chain.contents(file)
        return digests

    def _learn(
        self,
        learner: Learner,
        record: Record,
        contents: dict[str, Any],
        groups: Any,
        directory: Path,
    ) -> None:
        """Repeat one step and compare it with its record."""
        step, outcome = int(record["step"]), self._outcome
        compared = step in self._compared
        clock = Clock(dict(contents["clock"]))
        batch = make_batch(groups, clock, record["now"], self._config, record["max_off_policy"])
        batch = with_(batch, dropped=batch.dropped + record["late"])
        if (teacher := contents["teacher"]) is not None:
            outcome.listed("logprobs of the teacher", len(teacher) if compared else 0)
            pairs = zip(batch.items, teacher, strict=True)
            batch = with_(batch, items=tuple(with_(item, teacher=own) for item, own in pairs))
        if (tops := decode_teacher_tops(contents)) is not None:
            outcome.listed("likeliest tokens of the teacher", len(tops) if compared else 0)
            pairs = zip(batch.items, tops, strict=True)
            batch = with_(batch, items=tuple(with_(item, teacher_top=own) for item, own in pairs))
        if record["learning"] is None:
            outcome.compare(step, "tokens to learn from", 0, batch.learnt_tokens)
            self._save(learner, directory)
            return
        result = learner.step(batch, step)
        learnt = result, self._save(learner, directory)
        if compared:
            bound = CLOSE_BOUND[self._config.learner.dtype]
            tensors = partial(self._recorded_tensors, step)
            compare_step(outcome, record, batch, learnt, tensors, bound)

    def _save(self, learner: Learner, directory: Path) -> Digests:
        with TensorDigests(learner.tensors()) as digests:
            learner.save(directory, "replay")
            return digests.collect(directory)

    # DrawSampler

    async def _open_draws(self, stack: AsyncExitStack) -> DrawSampler | None:
        """Start an engine for fresh rollouts; None where it could not give the recorded bits."""
        if self._choose is None:
            return None
        steps, outcome = self._chain.steps, self._outcome
        workers = self._chain.start["arithmetic"]["workers"]
        samples = [steps[step]["samples"] for step in self._compared]
        tokens = sum(
            version["tokens"] for own in samples for version in own["tokens_by_version"].values()
        )
        if workers is None:
            outcome.listed("tokens sampled by workers that do not report their arithmetic", tokens)
            return None
        longest = max(own["longest"] for own in samples)
        model = model_directory(self._config.model)
        draws = await stack.enter_async_context(
            DrawSampler(self._config, model, longest, self._choose)
        )
        if (why := NumericsPlan(**workers).mismatch(draws.engine.plan)) is not None:
            outcome.listed(f"tokens sampled in other arithmetic ({why})", tokens)
            return None
        return draws

    def _drop_unused(self, directories: dict[int, Path], step: int) -> None:
        """Delete repeated checkpoints that no later step needs."""
        steps = self._chain.steps
        needed = {step} | {
            self._steps_of_labels.get(label, -1)
            for later in self._sampled
            if later > step
            for label in steps[later]["samples"]["tokens_by_version"]
        }
        for at in [at for at in directories if at not in needed]:
            shutil.rmtree(directories.pop(at))

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._torch, work, *arguments)
