"""The training loop: sample rollouts, learn, publish; in turn (sync) or overlapped (async)."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import perf_counter, time
from typing import TYPE_CHECKING, Any, TypeVar

from lockstep.chain.records import last_recorded_step
from lockstep.client.policy import Policy, connect
from lockstep.fleet.remote import RemoteFleet
from lockstep.tokens.errors import Conflict, LockstepError, VersionUnavailable
from lockstep.tokens.numerics import NumericsPlan
from lockstep.train.config import TrainConfig
from lockstep.train.envs.agent_session import agent_sessions
from lockstep.train.envs.environment import Environment, Task, load_environment
from lockstep.train.failure import tasks_ended
from lockstep.train.group_queue import GroupQueue
from lockstep.train.learning.batch import Clock, RolloutGroup, is_stale
from lockstep.train.learning.exactness import Exactness, base_card, check_base
from lockstep.train.learning.learner import Learner, own_plan
from lockstep.train.publish import FleetLike, Publisher
from lockstep.train.records.chain_recorder import ChainRecorder
from lockstep.train.records.run_dir import RunDirectory
from lockstep.train.records.sinks import Sinks, check_sinks
from lockstep.train.records.step_metrics import Evaluation, RunResult, StepMetrics
from lockstep.train.retry import RetryPolicy
from lockstep.train.rollout import RolloutRunner
from lockstep.train.step_store import StepStore
from lockstep.train.steps import OnStep, StepRunner

if TYPE_CHECKING:
    from lockstep.train.ranks.rank_group import RankGroup

T = TypeVar("T")


class Trainer:
    """One training run against a served policy and the control plane of its fleet.

        result = await Trainer(TrainConfig.read("run.toml")).run()

    URLs and token default to the config's. `fleet` may be any `FleetLike`, and `environment`
    replaces the one that the config names.
    """

    def __init__(
        self,
        config: TrainConfig,
        policy_url: str | None = None,
        admin_url: str | None = None,
        admin_token: str | None = None,
        *,
        fleet: FleetLike | None = None,
        environment: Environment | None = None,
        resume: bool = False,
        changes: Collection[str] = (),
        sign: Path | None = None,
        ranks: RankGroup | None = None,
    ) -> None:
        """`sign` names the PEM file of an ed25519 key that signs the records of the run. `ranks`
        are those that learn together; this process is rank 0 of them.
        """
        self.config = config
        self.directory = RunDirectory(config.run_dir)
        self._url = policy_url or config.serve.url
        self._admin = admin_url or config.serve.admin_url, admin_token or config.serve.admin_token
        self._fleet = fleet
        self._environment = environment or load_environment(config.env.name, config.env.options)
        self._resume, self._changes = resume, changes
        self._retry = RetryPolicy(config.serve.retry_seconds)
        # Torch runs in one thread of its own, so that the event loop stays free for rollouts.
        self._torch = ThreadPoolExecutor(1, thread_name_prefix="learner")
        self._sign = sign
        self._ranks = ranks

    async def run(self, on_step: OnStep | None = None) -> RunResult:
        """Train to the last step and evaluate. Raises errors that retrying did not resolve.

        With `resume`, an interrupted run continues from its last stable checkpoint. A field that
        decides what it learns must be as it was when the run started, unless `changes` names it.
        """
        check_sinks(self.config.sinks)
        async with AsyncExitStack() as stack:
            stack.callback(self._torch.shutdown, cancel_futures=True)
            await self._connect(stack)
            exactness = await self._compare_numerics()
            self._recorder = ChainRecorder(
                self.directory.path, self.config, self._environment, self._sign
            )
            stack.callback(self._recorder.close)
            first = await self._start(exactness, on_step, stack)
            watching = asyncio.create_task(self._publisher.watch(self._on_worker))
            stack.callback(watching.cancel)
            before = await self._evaluate_before(first)
            train = self._train_sync if self.config.loop.mode == "sync" else self._train_async
            await train(first)
            await self._steps.wait_synced()
            after = await self._evaluate(self.config.loop.steps)
            self._recorder.end(self._steps.current.step, before, after)
            version = self._steps.current.version
            self.directory.write_run(
                ended=time(), after=asdict(after) if after else None, version=version
            )
            path, metrics = str(self.directory.path), tuple(self._steps.metrics)
            return RunResult(path, version, before, after, metrics, exactness)

    # Start

    async def _connect(self, stack: AsyncExitStack) -> None:
        config, serve = self.config, self.config.serve
        adapter = config.learner.lora_name if config.learner.lora_rank else None
        if self._fleet is None:
            url, token = self._admin
            remote = RemoteFleet(url, token=token, token_file=serve.admin_token_file)
            self._fleet = await stack.enter_async_context(remote)
        publish = config.publish
        store = publish.store and StepStore(
            publish.store, deltas=publish.deltas, anchor_every=publish.anchor_every
        )
        self._publisher = Publisher(
            self._fleet, self._retry, adapter=adapter, mode=config.loop.update_mode,
            store=store or None,
        )  # fmt: skip
        self._policy = await stack.enter_async_context(
            connect(self._url, adapter or serve.model, api_key=serve.api_key,
                    tokenizer=serve.tokenizer or config.model)
        )  # fmt: skip
        self._teacher: Policy | None = None
        if config.loss_plan.loss.learns_from != "rewards" and config.teacher.url:
            teacher = config.teacher
            self._teacher = await stack.enter_async_context(
                connect(teacher.url, teacher.model, api_key=teacher.api_key)
            )
        self._rollouts = RolloutRunner(
            self._policy, self._environment, config, self._retry, self._restore_weights,
            agent_sessions(self._url, self._policy, self._fleet),
            workers=self._publisher.serving,
        )  # fmt: skip

    async def _compare_numerics(self) -> Exactness:
        """Decide from the numerics of trainer and workers whether this run is exact."""
        cards = await self._retry.call("models", lambda _: self._policy.models())
        card = base_card(cards, self.config.serve.model)
        trainer = await self._in_thread(self._own_plan)
        workers = None if card is None else card.numerics
        return Exactness.between(trainer, workers, self.config.learner)

    async def _start(
        self, exactness: Exactness, on_step: OnStep | None, stack: AsyncExitStack
    ) -> int:
        """Start or resume the run and publish its weights; return their step."""
        step = self._last_step() if self._resume else None
        if step is None:
            if self._resume and self.directory.run():
                raise Conflict(
                    f"{self.directory.path} has no stable checkpoint to resume from: remove it and "
                    "start again without --resume",
                    param="run_dir",
                )
            self.directory.start()
            self.directory.write_run(
                config=self.config.to_dict(), seed=self.config.seed, model=self.config.model,
                env=self.config.env.name, started=time(),
                ranks=1 if self._ranks is None else self._ranks.count,
            )  # fmt: skip
            self._record_exactness(exactness)
            self._open_sinks(stack)
            learner = await self._open_steps(exactness, None, on_step)
            if self.config.learner.lora_rank:
                await check_base(learner, self._url, self.config, self._retry)
            await self._in_thread(
                self._steps.save, 0, None, partial(self._recorder.start, exactness)
            )
            await self._steps.publish(0)
            return 0
        changes = self._record_changes(step)
        reported = self.directory.rewind(step)
        self._open_sinks(stack)
        learner = await self._open_steps(exactness, step, on_step)
        state = await self._in_thread(learner.load_step, self.directory, step)
        self._steps.clock = Clock(dict(state["versions"]))
        self._steps.played = state.get("played", step * self.config.rollout.groups)
        self._publisher.suffix = state["suffix"]
        digests = await self._in_thread(learner.digests, self.directory.checkpoint(step))
        self._recorder.resume(step, exactness, changes, digests)
        self.directory.event("resume", step=step)
        self._record_exactness(exactness)
        published = await self._steps.publish(step)
        # The run crashed after the checkpoint and before its metrics line: report the step now.
        if not reported and state["metrics"] is not None:
            self._steps.report(StepMetrics.from_json(state["metrics"]), published)
        return step

    def _last_step(self) -> int | None:
        """Return the step to resume from: the newest that has state, checkpoint and record."""
        return self.directory.last_step(last_recorded_step(self.directory.path))

    def _record_changes(self, step: int) -> Mapping[str, tuple[Any, Any]]:
        """Note and return the changed fields of a resumed run. Raises Conflict for one that was not
        named.
        """
        changed = self.config.differences(self.directory.run()["config"])
        for name, (before, now) in changed.items():
            if name not in self._changes:
                raise Conflict(
                    f"{name} is {now!r}, but the run in {self.directory.path} has {before!r}: "
                    f"restore it, or pass --change {name}={json.dumps(now)} to change it from step "
                    f"{step + 1} on",
                    param=name,
                )
            self.directory.event("change", step=step, field=name, before=before, now=now)
        self.directory.write_run(config=self.config.to_dict())
        return changed

    def _open_sinks(self, stack: AsyncExitStack) -> None:
        """Open the trackers. A failure of a tracker becomes an event of the run."""
        started = self.directory.run()["started"]
        self._sinks = stack.enter_context(
            Sinks.open(
                self.config.sinks, self.directory.path,
                f"{self.directory.path.name}-{started:.0f}", self.config.to_dict(),
                lambda name, why: self.directory.event("sink_failed", sink=name, reason=why),
            )
        )  # fmt: skip

    async def _open_steps(
        self, exactness: Exactness, step: int | None, on_step: OnStep | None
    ) -> Learner:
        """Create the step runner and its learner, with the weights of `step` or the model's."""
        weights = None if step is None else self.directory.checkpoint(step)
        learner = await self._in_thread(self._open_learner, exactness.is_exact, weights)
        self._steps = StepRunner(
            config=self.config, directory=self.directory, learner=learner,
            publisher=self._publisher, exactness=exactness, policy=self._policy,
            teacher=self._teacher, in_thread=self._in_thread, on_step=on_step, sinks=self._sinks,
            recorder=self._recorder,
        )  # fmt: skip
        return learner

    def _own_plan(self) -> NumericsPlan:
        if self._ranks is None:
            return own_plan(self.config)
        from lockstep.train.ranks.leader import shared_plan

        return shared_plan(self.config, self._ranks)

    def _open_learner(self, exact: bool, weights: Path | None) -> Learner:
        if self._ranks is None:
            return Learner(self.config, exact=exact, weights=weights)
        from lockstep.train.ranks.leader import LeadingLearner

        return LeadingLearner.open(self.config, exact=exact, weights=weights, ranks=self._ranks)

    def _record_exactness(self, exactness: Exactness) -> None:
        numerics = exactness.to_json()
        self.directory.write_run(numerics=numerics)
        self.directory.event("numerics", mode=numerics["mode"], reason=numerics["reason"])

    # The two modes

    async def _train_sync(self, first: int) -> None:
        """Sample the groups of a step, learn from them, and continue with the new weights."""
        tasks = self._rollouts.tasks("train", self._steps.played)
        pinned = await self._pins_version()
        for step in range(first + 1, self.config.loop.steps + 1):
            started = perf_counter()
            version = self._steps.current.label if pinned else None
            groups: list[RolloutGroup] = []
            for played in range(self._rounds):
                seeds = (self.config.seed, "step", step, *([played] if played else []))
                groups += await self._play(tasks, self._missing(groups), seeds, version)
                if not self._missing(groups):
                    break
            await self._steps.take(step, groups, started, 0)
            await self._evaluate_after(step)

    @property
    def _rounds(self) -> int:
        """How often a step may play tasks: once, unless groups with equal rewards are replaced."""
        return self.config.rollout.max_rounds if self.config.loss_plan.resamples else 1

    def _missing(self, groups: list[RolloutGroup]) -> int:
        """Return how many groups a step lacks to learn from."""
        resamples = self.config.loss_plan.resamples
        useful = sum(group.varies or not resamples for group in groups)
        return self.config.rollout.groups - useful

    async def _play(
        self, tasks: Iterator[Task], count: int, seeds: tuple[Any, ...], version: str | None
    ) -> list[RolloutGroup]:
        """Sample the groups of the next `count` tasks. Raises BadRequest where there are fewer."""
        step_tasks = list(itertools.islice(tasks, count))
        self._steps.played += len(step_tasks)
        if len(step_tasks) < count:
            raise self._tasks_ended(self._steps.played)
        size = self.config.rollout.group_size
        return await self._rollouts.groups(step_tasks, size, seeds, version)

    async def _pins_version(self) -> bool:
        """Return whether rollouts require the newest version, which the workers must support."""
        if self.config.learner.lora_rank:
            return False
        if self.config.loop.pin_version is not None:
            return self.config.loop.pin_version
        return await self._publisher.enforces_versions()

    async def _train_async(self, first: int) -> None:
        """Learn from groups in the order of their tasks, while others are sampled.

        The queue holds the groups of max_off_policy + 1 steps, so that none becomes too old.
        """
        per_step, limit = self.config.rollout.groups, self.config.loop.max_off_policy
        size = self.config.rollout.group_size

        async def run_group(number: int, task: Task) -> RolloutGroup:
            return await self._rollouts.group(task, size, (self.config.seed, "async", number))

        played = self._steps.played
        tasks = enumerate(self._rollouts.tasks("train", played), played)
        queue = GroupQueue(tasks, run_group, limit=per_step * (limit + 1))

        def release_step() -> None:
            queue.release(per_step)

        async with queue, self._steps.overlapping():
            for step in range(first + 1, self.config.loop.steps + 1):
                started = perf_counter()
                groups: list[RolloutGroup] = []
                late = 0
                while self._missing(groups) and len(groups) < per_step * self._rounds:
                    group = await queue.take()
                    if group is None:
                        raise self._tasks_ended(self._steps.played)
                    self._steps.played += 1
                    await self._steps.settle_for([group])
                    if is_stale(group, self._steps.clock, step - 1, limit):
                        late += sum(len(rollout.samples) for rollout in group.rollouts)
                        queue.release(1)
                    else:
                        groups.append(group)
                        if len(groups) > per_step:  # a step releases only `groups` of them
                            queue.release(1)
                await self._steps.take(step, groups, started, limit, late, on_served=release_step)
                # With max_off_policy 0 nothing can be sampled before the new weights are served.
                if not limit or self._evaluates(step):
                    await self._steps.settle()
                await self._evaluate_after(step)

    def _tasks_ended(self, count: int) -> LockstepError:
        needed = self.config.loop.steps * self.config.rollout.groups
        return tasks_ended(self.config.env.name, "train", count, needed)

    # While it runs

    async def _restore_weights(self, error: LockstepError) -> None:
        """Publish the weights again before a retry, if the fleet has lost them."""
        if isinstance(error, VersionUnavailable):
            with suppress(LockstepError):  # if the retry fails as well, its error is raised
                await self._publisher.ensure()

    def _on_worker(self, kind: str, worker: Any) -> None:
        self.directory.event(kind, worker=worker["id"], version=worker["version"])

    async def _evaluate_before(self, first: int) -> Evaluation | None:
        recorded = self.directory.run().get("before")
        if recorded is not None:
            return Evaluation(**recorded)
        if first != 0:
            return None
        before = await self._evaluate(0)
        self.directory.write_run(before=asdict(before) if before else None)
        return before

    def _evaluates(self, step: int) -> bool:
        return bool(self.config.eval.every) and step % self.config.eval.every == 0

    async def _evaluate_after(self, step: int) -> None:
        if self._evaluates(step) and not self._steps.metrics[-1].skipped:
            await self._evaluate(step)

    async def _evaluate(self, step: int) -> Evaluation | None:
        evaluation = await self._rollouts.evaluate(step)
        if evaluation is not None:
            self.directory.event("eval", **asdict(evaluation))
            self._sinks.evaluation(evaluation)
        return evaluation

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._torch, work, *arguments)
