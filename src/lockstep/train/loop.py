"""The training loop: play, learn, publish; in turns, or playing on while it learns."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, replace
from time import perf_counter, time
from typing import Any, TypeVar

from lockstep.client.policy import Policy, connect
from lockstep.fleet.remote import RemoteFleet
from lockstep.tokens.errors import Conflict, LockstepError, NotExact, VersionUnavailable
from lockstep.tokens.numerics import NumericsPlan
from lockstep.train.config import TrainConfig
from lockstep.train.envs.environment import Environment, Task, load_environment
from lockstep.train.failure import tasks_ended
from lockstep.train.group_queue import GroupQueue
from lockstep.train.learning.base_check import check_base
from lockstep.train.learning.batch import Clock, RolloutGroup, TrainBatch, is_stale, make_batch
from lockstep.train.learning.distill import teacher_logprobs
from lockstep.train.learning.exactness import Exactness, base_card
from lockstep.train.learning.learner import Learner, own_plan
from lockstep.train.publish import FleetLike, Published, Publisher
from lockstep.train.records.metrics import Evaluation, RunResult, StepMetrics
from lockstep.train.records.run_dir import RunDirectory
from lockstep.train.records.step_metrics import nothing_learnt, step_metrics
from lockstep.train.records.transcript import transcripts
from lockstep.train.retry import RetryPolicy
from lockstep.train.rollout import RolloutRunner

OnStep = Callable[[StepMetrics], None]
T = TypeVar("T")


class Trainer:
    """One run against a served policy and the control plane of its fleet.

    URLs and token default to the config's. `fleet` may be any `FleetLike`; `environment` any
    Environment, in place of the one that the config names.
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
    ) -> None:
        self.config = config
        self.directory = RunDirectory(config.run_dir)
        self._url = policy_url or config.serve.url
        self._admin = admin_url or config.serve.admin_url, admin_token or config.serve.admin_token
        self._fleet = fleet
        self._environment = environment or load_environment(config.env.name, config.env.options)
        self._resume = resume
        self._patience = RetryPolicy(config.serve.retry_seconds)
        self._clock = Clock()
        self._steps: list[StepMetrics] = []
        self._skipped = 0
        # All of torch in one thread of its own: the loop stays free to play and to watch.
        self._torch = ThreadPoolExecutor(1, thread_name_prefix="learner")

    async def run(self, on_step: OnStep | None = None) -> RunResult:
        """Trains to the last step and evaluates. Raises what cannot be waited for.

        A run that was cut off goes on from its last stable checkpoint when `resume` is set.
        """
        async with AsyncExitStack() as stack:
            stack.callback(self._torch.shutdown, cancel_futures=True)
            await self._open(stack)
            first = await self._begin(on_step)
            watching = asyncio.create_task(self._publisher.watch(self._on_worker))
            stack.callback(watching.cancel)
            before = await self._evaluate_before(first)
            rounds = self._sync if self.config.loop.mode == "sync" else self._async
            await rounds(first, on_step)
            after = await self._evaluate(self.config.loop.steps)
            self.directory.write_run(
                ended=time(), after=asdict(after) if after else None, version=self._now.version
            )
            return RunResult(
                str(self.directory.path), self._now.version, before, after, tuple(self._steps),
                self._exactness,
            )  # fmt: skip

    # Beginning

    async def _open(self, stack: AsyncExitStack) -> None:
        config, serve = self.config, self.config.serve
        adapter = config.learner.lora_name if config.learner.lora_rank else None
        if self._fleet is None:
            url, token = self._admin
            remote = RemoteFleet(url, token=token, token_file=serve.admin_token_file)
            self._fleet = await stack.enter_async_context(remote)
        fleet = self._fleet
        self._publisher = Publisher(
            fleet, self._patience, adapter=adapter, mode=config.loop.update_mode
        )
        self._policy = await stack.enter_async_context(
            connect(self._url, adapter or serve.model, api_key=serve.api_key,
                    tokenizer=serve.tokenizer or config.model)
        )  # fmt: skip
        self._teacher: Policy | None = None
        if config.loss.kind == "distill":
            teacher = config.teacher
            self._teacher = await stack.enter_async_context(
                connect(teacher.url, teacher.model, api_key=teacher.api_key)
            )
        self._players = RolloutRunner(
            self._policy, self._environment, config, self._patience, self._heal
        )

    async def _compare(self) -> Exactness:
        """Reads how the workers compute and decides with that how this run does."""
        cards = await self._patience.call("models", lambda _: self._policy.models())
        card = base_card(cards, self.config.serve.model)
        workers: NumericsPlan | None = None if card is None else card.numerics
        trainer = await self._in_thread(own_plan, self.config)
        return Exactness.between(trainer, workers, self.config.learner)

    async def _begin(self, on_step: OnStep | None) -> int:
        """Makes or finds the first weights and has the fleet serve them; returns their step."""
        self._exactness = await self._compare()
        step = self.directory.last_step() if self._resume else None
        if step is None:
            if self._resume and self.directory.run():
                raise Conflict(
                    f"{self.directory.path} has no stable checkpoint to resume from: remove it and "
                    "start anew",
                    param="run_dir",
                )
            self.directory.start()
            self.directory.write_run(
                config=self.config.to_dict(), seed=self.config.seed, model=self.config.model,
                env=self.config.env.name, started=time(),
            )  # fmt: skip
            self._tell_exactness()
            self._learner = await self._in_thread(self._make_learner, None)
            if self.config.learner.lora_rank:
                await check_base(self._learner, self._url, self.config, self._patience)
            await self._in_thread(self._save, 0, None)
            await self._publish(0)
            return 0
        written = self.directory.rewind(step)
        self._learner = await self._in_thread(self._make_learner, step)
        state = self.directory.load_state(step)
        self._learner.load_state(state)
        self._clock = Clock(dict(state["versions"]))
        self._publisher.suffix = state["suffix"]
        self.directory.event("resume", step=step)
        self._tell_exactness()
        published = await self._publish(step)
        if not written and state["metrics"] is not None:
            self._report(StepMetrics.from_json(state["metrics"]), published, on_step)
        return step

    def _make_learner(self, step: int | None) -> Learner:
        weights = None if step is None else self.directory.checkpoint(step)
        return Learner(self.config, exact=self._exactness.is_exact, weights=weights)

    def _tell_exactness(self) -> None:
        numerics = self._exactness.to_json()
        self.directory.write_run(numerics=numerics)
        self.directory.event("numerics", mode=numerics["mode"], reason=numerics["reason"])

    # The two modes

    async def _sync(self, first: int, on_step: OnStep | None) -> None:
        per_step, size = self.config.rollout.groups, self.config.rollout.group_size
        tasks = self._players.tasks("train", first * per_step)
        pinned = self.config.loop.pin_version and not self.config.learner.lora_rank
        for step in range(first + 1, self.config.loop.steps + 1):
            begun = perf_counter()
            version = self._now.label if pinned else None
            chosen = list(itertools.islice(tasks, per_step))
            if len(chosen) < per_step:
                raise self._ended((step - 1) * per_step + len(chosen))
            seeds = (self.config.seed, "step", step)
            groups = await self._players.groups(chosen, size, seeds, version)
            await self._learn(step, groups, begun, perf_counter() - begun, 0, on_step)

    async def _async(self, first: int, on_step: OnStep | None) -> None:
        per_step, limit = self.config.rollout.groups, self.config.loop.max_off_policy
        size = self.config.rollout.group_size

        async def play(number: int, task: Task) -> RolloutGroup:
            return await self._players.group(task, size, (self.config.seed, "async", number))

        tasks = enumerate(self._players.tasks("train", first * per_step), first * per_step)
        async with GroupQueue(tasks, play, ahead=per_step * (limit + 1)) as queue:
            for step in range(first + 1, self.config.loop.steps + 1):
                begun = perf_counter()
                groups: list[RolloutGroup] = []
                late = 0
                while len(groups) < per_step:
                    group = await queue.take()
                    if group is None:
                        raise self._ended((step - 1) * per_step + len(groups))
                    if is_stale(group, self._clock, step - 1, limit):
                        late += sum(len(rollout.samples) for rollout in group.rollouts)
                        queue.release(1)
                    else:
                        groups.append(group)
                played = perf_counter() - begun
                await self._learn(step, groups, begun, played, limit, on_step, late)
                queue.release(per_step)

    def _ended(self, given: int) -> LockstepError:
        needed = self.config.loop.steps * self.config.rollout.groups
        return tasks_ended(self.config.env.name, "train", given, needed)

    async def _learn(
        self, step: int, groups: list[RolloutGroup], begun: float, played: float, limit: int,
        on_step: OnStep | None, late: int = 0,
    ) -> None:  # fmt: skip
        """One step on these groups: learn, save, publish, report. `late` samples were dropped."""
        batch = make_batch(groups, self._clock, step - 1, self.config, limit)
        batch = replace(batch, dropped=batch.dropped + late)
        if not batch.learnt_tokens:
            self._skip(step, batch, played, on_step)
            return
        self._skipped = 0
        if self._teacher is not None:
            scores = await teacher_logprobs(
                self._teacher,
                [item.sample for item in batch.items],
                temperature=self.config.rollout.temperature,
            )
            pairs = zip(batch.items, scores, strict=True)
            batch = replace(batch, items=tuple(replace(item, teacher=s) for item, s in pairs))
        at = perf_counter()
        learnt = await self._in_thread(self._learner.step, batch, step)
        trained = perf_counter() - at
        draft = step_metrics(step, batch, learnt, played, trained)
        self._check_mismatch(draft)
        at = perf_counter()
        await self._in_thread(self._save, step, draft)
        saved = perf_counter() - at
        shown = self.config.rollout.samples_shown
        tokenizer = self._policy.renderer().tokenizer
        env = self.config.env.name
        self.directory.samples(transcripts(step, env, batch, learnt.logprobs, tokenizer, shown))
        published = await self._publish(step)
        total = perf_counter() - begun
        rate = batch.tokens / total
        draft = replace(draft, time_save=saved, time_step=total, tokens_per_second=rate)
        self._report(draft, published, on_step)
        if self.config.eval.every and step % self.config.eval.every == 0:
            await self._evaluate(step)

    # Parts of a step

    def _skip(self, step: int, batch: TrainBatch, played: float, on_step: OnStep | None) -> None:
        """A step without a token to learn from: written down, and the weights stay as they are.

        Raises Conflict when there were more of them in a row than the config allows.
        """
        self._skipped += 1
        why = (
            f"no token to learn from: {batch.dropped} samples were dropped "
            f"({batch.aborts} aborts, {batch.mixed} of mixed versions)"
        )
        self.directory.event("skipped", step=step, in_a_row=self._skipped, reason=why)
        if self._skipped > self.config.loop.max_skipped:
            raise Conflict(
                f"step {step} had {why}, and so had all of the last {self._skipped} steps; "
                f"loop.max_skipped allows {self.config.loop.max_skipped} in a row: look at "
                "loop.aborted, loop.mixed and loop.max_off_policy, and at the fleet's events",
                param="loop.max_skipped",
            )
        self._clock.skip()
        same = replace(self._now, seconds=0.0, pause_seconds=0.0)
        self._report(step_metrics(step, batch, nothing_learnt(), played, 0.0), same, on_step)

    def _check_mismatch(self, draft: StepMetrics) -> None:
        """Writes down tokens of the current weights whose logprobs are further off than they may
        be. Raises NotExact for them where exactness was demanded."""
        worst, bound = draft.more["mismatch_max"], self._exactness.bound
        if draft.off_policy_max > 0 or worst <= bound:
            return
        self.directory.event("mismatch", step=draft.step, mismatch_max=worst, bound=bound)
        if self.config.learner.exact:
            raise NotExact(
                f"exactness was demanded, and the trainer's logprobs of step {draft.step} are off "
                f"by up to {worst:.3g} from the engine's under the same weights",
                param="learner.exact",
            )

    def _save(self, step: int, draft: StepMetrics | None) -> None:
        """The trainer's state first: where the checkpoint is stable, nothing is missing."""
        self.directory.save_state(
            step,
            {
                **self._learner.state(),
                "step": step,
                "versions": dict(self._clock.steps),
                "suffix": self._publisher.suffix,
                "metrics": None if draft is None else draft.to_json(),
            },
        )
        self._learner.save(self.directory.checkpoint(step), f"step-{step}")

    async def _publish(self, step: int) -> Published:
        begun = time()
        published = await self._publisher.publish(self.directory.checkpoint(step), step)
        self._now = published
        self._clock.tick(published.label, step)
        self.directory.event(
            "update", step=step, version=published.version, started=begun,
            seconds=published.seconds, pause_seconds=published.pause_seconds,
            workers=list(published.workers),
        )  # fmt: skip
        self.directory.prune(self.config.loop.keep_checkpoints)
        return published

    def _report(self, draft: StepMetrics, published: Published, on_step: OnStep | None) -> None:
        metrics = replace(
            draft,
            version=published.version,
            pause_seconds=published.pause_seconds,
            time_update=published.seconds,
            workers=published.workers,
        )
        self._steps.append(metrics)
        self.directory.metrics(metrics.to_json())
        if on_step is not None:
            on_step(metrics)

    async def _heal(self, error: LockstepError) -> None:
        """Before a rollout is tried again: a fleet that lost its weights gets them back."""
        if isinstance(error, VersionUnavailable):
            with suppress(LockstepError):
                await self._publisher.ensure()

    def _on_worker(self, kind: str, worker: Any) -> None:
        self.directory.event(kind, worker=worker["id"], version=worker["version"])

    # Evaluation

    async def _evaluate_before(self, first: int) -> Evaluation | None:
        known = self.directory.run().get("before")
        if known is not None:
            return Evaluation(**known)
        if first != 0:
            return None
        before = await self._evaluate(0)
        self.directory.write_run(before=asdict(before) if before else None)
        return before

    async def _evaluate(self, step: int) -> Evaluation | None:
        found = await self._players.evaluate(step)
        if found is not None:
            self.directory.event("eval", **asdict(found))
        return found

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._torch, work, *arguments)
