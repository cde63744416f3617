"""Repeats recorded steps: learns from the recorded samples again and compares what comes out."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace as with_
from pathlib import Path
from typing import Any, TypeVar

from lockstep.chain.records import Chain, Record
from lockstep.engine.numerics.plan import fingerprint
from lockstep.models import bundled
from lockstep.replay.draws import Draws
from lockstep.replay.findings import Replay, ReplayDifference
from lockstep.replay.rewards import Rewards
from lockstep.tokens.errors import BadRequest
from lockstep.tokens.numerics import NumericsPlan
from lockstep.train.config import TrainConfig
from lockstep.train.envs.environment import load_environment
from lockstep.train.learning.batch import Clock, make_batch
from lockstep.train.learning.exactness import CLOSE_BOUND
from lockstep.train.learning.learner import Learner, own_plan
from lockstep.train.records.chain_recorder import code_version, model_files
from lockstep.train.records.run_dir import RunDirectory
from lockstep.train.records.step_contents import batch_digests, decode_groups
from lockstep.train.records.tensor_digests import Digests, TensorDigests, combine

T = TypeVar("T")
OnStep = Callable[[int], None]
IN_BAND = ("loss", "entropy", "mismatch_max", "grad_norm")
"""Metrics that are compared where two machines compute other bits."""


async def replay(
    run: str | Path,
    *,
    first: int | None = None,
    last: int | None = None,
    fresh_rollouts: bool = False,
    fresh_steps: Collection[int] | None = None,
    model: str | None = None,
    on_step: OnStep | None = None,
) -> Replay:
    """Repeat the steps of a run from `first` to `last` and compare them with their records.

        outcome = await replay("runs/calc", first=5, last=8, fresh_rollouts=True)
        assert outcome.held, outcome.differences

    Steps before `first` that no kept checkpoint covers are repeated as well. With `fresh_rollouts`,
    all draws (of `fresh_steps`, if given) are sampled again from their seeds and weights. `model`
    replaces the model that training started from, where it is at another place here.

    Raises NotFound without a chain, and BadRequest for steps that were not recorded and for records
    that are missing or altered.
    """
    repeated = _Replayer(Chain.read(run), model, on_step)
    return await repeated.run(first, last, fresh_rollouts, fresh_steps)


class _Replayer:
    def __init__(self, chain: Chain, model: str | None, on_step: OnStep | None) -> None:
        self._chain = chain
        self._model = model
        self._on_step = on_step
        self._directory = RunDirectory(chain.directory)
        self._config = self._config_of(chain.start)
        self._outcome = Replay(str(chain.directory))
        # One thread computes all products of the learner, as in a run.
        self._torch = ThreadPoolExecutor(1, thread_name_prefix="replay")
        self._steps_of_labels = {
            update["label"]: update["step"]
            for link in chain.links
            for update in link.record.get("updates", ())
        }

    def _config_of(self, record: Record) -> TrainConfig:
        config = TrainConfig.of(record["config"])
        return config if self._model is None else with_(config, model=self._model)

    async def run(
        self,
        first: int | None,
        last: int | None,
        fresh: bool,
        fresh_steps: Collection[int] | None,
    ) -> Replay:
        steps, outcome = self._chain.steps, self._outcome
        if not steps:
            raise BadRequest("the run has no recorded step yet", param="run")
        outcome.first = min(steps) if first is None else first
        outcome.last = max(steps) if last is None else last
        if outcome.first not in steps or outcome.last not in steps or (
            outcome.first > outcome.last
        ):  # fmt: skip
            raise BadRequest(
                f"steps {outcome.first}..{outcome.last} are not recorded: the run has steps "
                f"{min(steps)} to {max(steps)}",
                param="steps",
            )
        outcome.differences += [
            ReplayDifference(0, "chain", "", "whole", why) for why in self._chain.breaks
        ]
        fresh_of = set(range(outcome.first, outcome.last + 1)) if fresh else set[int]()
        if fresh_steps is not None:
            fresh_of &= set(fresh_steps)
        try:
            await self._compare_arithmetic()
            self._compare_inputs()
            with tempfile.TemporaryDirectory(prefix="lockstep-replay-") as scratch:
                await self._repeat(Path(scratch), fresh_of)
        finally:
            self._torch.shutdown()
        return outcome

    # Before the first step

    async def _compare_arithmetic(self) -> None:
        """Decide whether this machine computes the bits of the recorded one."""
        recorded, outcome = self._chain.start["arithmetic"], self._outcome
        own = await self._in_thread(own_plan, self._config)
        plan = NumericsPlan(**recorded["trainer"])
        why = plan.mismatch(own)
        # A close trainer repeats its own bits on the machine and libraries that it ran on.
        same = plan.to_json() == own.to_json() and recorded["machine"] == fingerprint()
        if why is not None and not same:
            outcome.mode, outcome.reason = "band", why
        elif not plan.is_exact:
            outcome.notes.append(f"The run was close ({plan.reason}), on a machine like this one.")

    def _compare_inputs(self) -> None:
        """Compare model files and code with the recorded ones."""
        start, outcome = self._chain.start, self._outcome
        for name, digest in start["model"].items():
            outcome.compare(
                0,
                "model file",
                digest[:16],
                model_files(self._config.model).get(name, "")[:16],
                name,
            )
        environment = load_environment(self._config.env.name, self._config.env.options)
        here = code_version(environment)
        for name, value in start["code"].items():
            if (own := here.get(name)) != value:
                outcome.notes.append(
                    f"The code differs: {name} was {str(value)[:16]}, here {str(own)[:16]}."
                )

    # Steps

    async def _repeat(self, scratch: Path, fresh_of: set[int]) -> None:
        outcome, steps = self._outcome, self._chain.steps
        base = self._base(outcome.first, fresh_of)
        learner = await self._in_thread(self._open, base)
        directories = {base: scratch / f"step-{base}"}
        digests = await self._in_thread(self._save, learner, directories[base])
        self._compare_base(base, digests)
        rewards = Rewards(
            self._config, load_environment(self._config.env.name, self._config.env.options)
        )
        async with AsyncExitStack() as stack:
            draws = await self._open_draws(fresh_of, stack)
            for step in range(base + 1, outcome.last + 1):
                if step not in steps:
                    raise BadRequest(
                        f"step {step} has no record: the run cannot be repeated past it"
                    )
                learner = await self._changed(learner, step, directories)
                record = steps[step]
                contents = self._chain.contents(record["file"])
                groups = decode_groups(contents)
                if step >= outcome.first:
                    await rewards.check(step, contents, groups, outcome)
                    if draws is not None and step in fresh_of:
                        available = {
                            label: directories[at]
                            for label, at in self._steps_of_labels.items()
                            if at in directories
                        }
                        await draws.check(step, groups, available, outcome)
                directories[step] = scratch / f"step-{step}"
                await self._in_thread(
                    self._learn, learner, record, contents, groups, directories[step]
                )
                if step >= outcome.first:
                    outcome.steps.append(step)
                self._drop_unused(directories, step, fresh_of)
                if self._on_step is not None:
                    self._on_step(step)

    def _base(self, first: int, fresh_of: set[int]) -> int:
        """Return the step to start from: the newest kept one that covers all needed versions."""
        steps = self._chain.steps
        needed = [
            self._steps_of_labels[label]
            for step in fresh_of
            for label in steps[step]["samples"]["tokens_by_version"]
            if label in self._steps_of_labels
        ]
        newest = min([first - 1, *needed])
        start = int(self._chain.start["step"])
        usable = self._directory.last_step(newest)
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
                config = self._config_of(link.record)
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
                self._config = self._config_of(link.record)
                learner = await self._in_thread(self._reopen, learner, directories[step - 1])
        return learner

    def _reopen(self, learner: Learner, weights: Path) -> Learner:
        opened = Learner(self._config, exact=learner.exact, weights=weights)
        opened.load_state(learner.state())
        return opened

    def _compare_base(self, base: int, digests: Digests) -> None:
        recorded = self._recorded_tensors(base)
        if self._outcome.mode == "bits" or base:
            self._compare_tensors(base, recorded["weights"], digests["weights"], "weights")

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
        compared = step >= outcome.first
        clock = Clock(dict(contents["clock"]))
        batch = make_batch(groups, clock, record["now"], self._config, record["max_off_policy"])
        batch = with_(batch, dropped=batch.dropped + record["late"])
        if (teacher := contents["teacher"]) is not None:
            outcome.listed("logprobs of the teacher", len(teacher))
            pairs = zip(batch.items, teacher, strict=True)
            batch = with_(batch, items=tuple(with_(item, teacher=own) for item, own in pairs))
        learning = record["learning"]
        if learning is None:
            outcome.compare(step, "tokens to learn from", 0, batch.learnt_tokens)
            self._save(learner, directory)
            return
        result = learner.step(batch, step)
        digests = self._save(learner, directory)
        if not compared:
            return
        own = batch_digests(batch, result.passes)
        for name, value in record["batch"].items():
            outcome.compare(step, "batch", value, own.get(name), name)
        if outcome.mode == "band":
            self._compare_band(step, learning["metrics"], result.metrics)
            return
        for name, value in learning["metrics"].items():
            outcome.compare(step, name, value, _as_recorded(result.metrics.get(name)))
        combined = combine(digests)
        for kind in ("gradients", "optimizer", "weights"):
            if not outcome.compare(step, kind, learning[kind], combined[kind]):
                recorded = self._recorded_tensors(step)
                outcome.differences.pop()
                self._compare_tensors(step, recorded[kind], digests[kind], kind)

    def _compare_tensors(
        self, step: int, recorded: Mapping[str, str], own: Mapping[str, str], kind: str
    ) -> None:
        """Compare tensors one by one; note the first that differs, and how many do."""
        outcome = self._outcome
        differing = [name for name in recorded if recorded[name] != own.get(name)]
        outcome.digests += 1
        if differing:
            name = differing[0]
            where = f"{name} ({len(differing)} of {len(recorded)} tensors differ)"
            outcome.differences.append(
                ReplayDifference(step, kind, where, recorded[name], own.get(name, "no such tensor"))
            )

    def _compare_band(self, step: int, recorded: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        bound = CLOSE_BOUND[self._config.learner.dtype]
        for name in IN_BAND:
            before, now = float(recorded[name]), float(own[name])
            self._outcome.digests += 1
            if not abs(before - now) <= bound * max(1.0, abs(before)):
                self._outcome.differences.append(ReplayDifference(step, name, "", before, now))

    def _save(self, learner: Learner, directory: Path) -> Digests:
        with TensorDigests(learner.tensors()) as digests:
            learner.save(directory, "replay")
            return digests.collect(directory)

    # Draws

    async def _open_draws(self, fresh_of: set[int], stack: AsyncExitStack) -> Draws | None:
        """Start an engine for fresh rollouts; None where it could not give the recorded bits."""
        if not fresh_of:
            return None
        steps, outcome = self._chain.steps, self._outcome
        workers = self._chain.start["arithmetic"]["workers"]
        tokens = sum(
            version["tokens"]
            for step in fresh_of
            for version in steps[step]["samples"]["tokens_by_version"].values()
        )
        if workers is None:
            outcome.listed("tokens sampled by workers that do not report their arithmetic", tokens)
            return None
        longest = max(steps[step]["samples"]["longest"] for step in fresh_of)
        model = bundled(self._config.model) or Path(self._config.model)
        draws = await stack.enter_async_context(Draws(self._config, model, longest))
        if (why := NumericsPlan(**workers).mismatch(draws.engine.plan)) is not None:
            outcome.listed(f"tokens sampled in other arithmetic ({why})", tokens)
            return None
        return draws

    def _drop_unused(self, directories: dict[int, Path], step: int, fresh_of: set[int]) -> None:
        """Delete repeated checkpoints that no later step needs."""
        steps = self._chain.steps
        needed = {step} | {
            self._steps_of_labels.get(label, -1)
            for later in fresh_of
            if later > step
            for label in steps[later]["samples"]["tokens_by_version"]
        }
        for at in [at for at in directories if at not in needed]:
            shutil.rmtree(directories.pop(at))

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._torch, work, *arguments)


def _as_recorded(value: Any) -> Any:
    """Return a number as JSON keeps it: NaN and infinities are text."""
    return repr(value) if isinstance(value, float) and value - value != 0 else value
