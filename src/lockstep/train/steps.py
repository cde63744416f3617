"""One training step: learn from a batch, save the weights, publish them, report."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from time import perf_counter, time
from typing import Any

from lockstep.checkpoint.files import PutOffSyncs, put_off_syncs
from lockstep.client.policy import Policy
from lockstep.tokens.errors import Conflict, LockstepError, NotExact
from lockstep.train.config import TrainConfig
from lockstep.train.learning.batch import (
    Clock,
    RolloutGroup,
    TrainBatch,
    failures,
    make_batch,
)
from lockstep.train.learning.distributions import teacher_top
from lockstep.train.learning.exactness import Exactness
from lockstep.train.learning.learner import Learner
from lockstep.train.learning.teacher import teacher_scores
from lockstep.train.mismatch import MismatchExplainer
from lockstep.train.publish import Published, Publisher
from lockstep.train.records.chain_recorder import ChainRecorder
from lockstep.train.records.run_dir import RunDirectory
from lockstep.train.records.sinks import Sinks
from lockstep.train.records.step_metrics import StepMetrics, nothing_learnt, step_metrics
from lockstep.train.records.tensor_digests import Digests
from lockstep.train.records.transcript import transcripts

OnStep = Callable[[StepMetrics], None]
InThread = Callable[..., Awaitable[Any]]
"""Runs a function in the learner's thread, the only one that uses torch."""


@dataclass(slots=True, kw_only=True)
class StepRunner:
    """Takes the steps of one run.

    `current` is what the fleet serves now, `metrics` are those of the steps of this process, and
    `clock` holds the versions that this run has published.
    """

    config: TrainConfig
    directory: RunDirectory
    learner: Learner
    publisher: Publisher
    exactness: Exactness
    policy: Policy
    teacher: Policy | None
    in_thread: InThread
    on_step: OnStep | None
    sinks: Sinks
    recorder: ChainRecorder
    clock: Clock = field(default_factory=Clock)
    metrics: list[StepMetrics] = field(default_factory=list)
    current: Published = field(init=False)
    mismatch: MismatchExplainer = field(init=False)
    played: int = 0
    """Number of tasks whose groups were sampled, also by the processes before a resume."""
    skipped: int = 0
    """Number of skipped steps in a row."""
    _publishing: asyncio.Task[None] | None = None
    _unsynced: PutOffSyncs | None = None
    _syncing: asyncio.Task[None] | None = None
    _reported: float = 0.0

    def __post_init__(self) -> None:
        self.mismatch = MismatchExplainer(self.config, self.directory, self.exactness)

    async def take(
        self,
        step: int,
        groups: list[RolloutGroup],
        started: float,
        max_off_policy: int,
        late: int = 0,
        on_served: Callable[[], None] | None = None,
    ) -> None:
        """Take one step on groups that were sampled since `started`; `late` samples were dropped.

        With `on_served` it returns once the weights are saved. The fleet updates to them during the
        next step, and `on_served` is called when it serves them. The next step is not saved before
        that.

        Raises Conflict when too many steps in a row were skipped, NotExact when exactness is
        required and did not hold, and what the fleet raises.
        """
        rollout_seconds = perf_counter() - started
        await self.settle_for(groups)
        if causes := failures(groups):
            self.directory.event("failed_rollouts", step=step, causes=causes)
        batch = make_batch(groups, self.clock, step - 1, self.config, max_off_policy)
        batch = replace(batch, dropped=batch.dropped + late)
        if not batch.learnt_tokens:
            await self.settle()
            self.recorder.prepare(step, groups, batch, self.clock, self.played)
            await asyncio.to_thread(self.recorder.step, step, batch, late, max_off_policy, None)
            self._skip(step, batch, rollout_seconds)
            if on_served is not None:
                on_served()
            return
        self.skipped = 0
        batch = await self._with_teacher(batch)
        self.recorder.prepare(step, groups, batch, self.clock, self.played)
        at = perf_counter()
        outcome = await self.in_thread(self.learner.step, batch, step)
        draft = step_metrics(step, batch, outcome, rollout_seconds, perf_counter() - at)
        if self.mismatch.is_due(draft):
            await self.in_thread(self.mismatch.explain, draft, batch, outcome, self.clock)
        self._check_mismatch(draft)
        await self.settle()  # the saved state names every version that was published before
        await self.wait_synced()
        env, count = self.config.env.name, self.config.rollout.samples_shown
        tokenizer = self.policy.renderer().tokenizer
        # Before the checkpoint: a resume drops the rows of steps that have none, but cannot make
        # up the rows of a step that has one.
        self.directory.samples(transcripts(step, env, batch, outcome.logprobs, tokenizer, count))
        at = perf_counter()

        def record(digests: Digests) -> None:
            self.recorder.step(step, batch, late, max_off_policy, (outcome, digests))

        await self.in_thread(self.save, step, draft, record)
        save_seconds = perf_counter() - at
        draft = replace(draft, time_save=save_seconds)
        # Async mode: the next step is learnt while the fleet stages and proves this one.
        if on_served is None:
            await self._serve(draft, started)
        else:
            self._publishing = asyncio.create_task(self._serve(draft, started, on_served))

    async def _serve(
        self, draft: StepMetrics, started: float, on_served: Callable[[], None] | None = None
    ) -> None:
        """Publish the step of the draft and report it."""
        published = await self.publish(draft.step)
        now = perf_counter()
        # Steps overlap: count only the time since the previous step was reported.
        total = now - max(started, self._reported)
        self._reported = now
        rate = draft.tokens / total
        self.report(replace(draft, time_step=total, tokens_per_second=rate), published)
        if on_served is not None:
            on_served()

    async def settle(self) -> None:
        """Wait until the fleet serves the last step. Raises what publishing it raised."""
        publishing, self._publishing = self._publishing, None
        if publishing is not None:
            await publishing

    async def settle_for(self, groups: Sequence[RolloutGroup]) -> None:
        """Wait for a pending update if a token was sampled under its weights.

        A worker may serve new weights before the update of the whole fleet is reported.
        """
        versions = self.clock.steps
        rollouts = (rollout for group in groups for rollout in group.rollouts)
        samples = (sample for rollout in rollouts for sample in rollout.samples)
        if any(span.version not in versions for sample in samples for span in sample.versions):
            await self.settle()

    @asynccontextmanager
    async def overlapping(self) -> AsyncIterator[None]:
        """Settle at the end of the block; cancel a pending update if the block raises."""
        try:
            yield
            await self.settle()
        finally:
            if self._publishing is not None:
                self._publishing.cancel()
                with suppress(
                    asyncio.CancelledError, LockstepError
                ):  # the error of the block is raised
                    await self._publishing

    async def _with_teacher(self, batch: TrainBatch) -> TrainBatch:
        """Return the batch with the teacher's logprobs, if the run has a teacher."""
        if self.teacher is None:
            return batch
        samples = [item.sample for item in batch.items]
        temperature = self.config.rollout.temperature
        if self.config.loss_plan.loss.learns_from == "distributions":
            count = self.config.teacher.top_k
            scores = await teacher_scores(self.teacher, samples, temperature, top=count)
            tops = zip(batch.items, (teacher_top(own, count) for own in scores), strict=True)
            return replace(batch, items=tuple(replace(item, teacher_top=own) for item, own in tops))
        scores = await teacher_scores(self.teacher, samples, temperature)
        pairs = zip(batch.items, scores, strict=True)
        items = (replace(item, teacher=own.logprobs) for item, own in pairs)
        return replace(batch, items=tuple(items))

    def _skip(self, step: int, batch: TrainBatch, rollout_seconds: float) -> None:
        """Record a step without a token to learn from; the weights stay as they are.

        Raises Conflict after more than loop.max_skipped such steps in a row.
        """
        self.skipped += 1
        reason = (
            f"no token to learn from: {batch.dropped} samples were dropped "
            f"({batch.aborts} aborts, {batch.mixed} of mixed versions)"
        )
        self.directory.event("skipped", step=step, in_a_row=self.skipped, reason=reason)
        if self.skipped > self.config.loop.max_skipped:
            raise Conflict(
                f"step {step} was skipped, as were all of the last {self.skipped} steps: {reason}; "
                f"loop.max_skipped allows {self.config.loop.max_skipped} in a row: check "
                "loop.aborted, loop.mixed and loop.max_off_policy, and the fleet's events",
                param="loop.max_skipped",
            )
        self.clock.skip()
        same = replace(self.current, seconds=0.0, pause_seconds=0.0)
        self.report(step_metrics(step, batch, nothing_learnt(), rollout_seconds, 0.0), same)

    def _check_mismatch(self, draft: StepMetrics) -> None:
        """Record logprobs under the current weights that differ by more than the bound.

        Raises NotExact for them if exactness is required.
        """
        worst, bound = draft.more["mismatch_max"], self.exactness.bound
        # Tokens of older weights differ by what was learnt since, whatever the arithmetic.
        if draft.off_policy_max > 0 or worst <= bound:
            return
        self.directory.event("mismatch", step=draft.step, mismatch_max=worst, bound=bound)
        if self.config.learner.exact:
            raise NotExact(
                f"learner.exact is true, but the trainer's logprobs of step {draft.step} differ by "
                f"up to {worst:.3g} from the engine's under the same weights",
                param="learner.exact",
            )

    def save(
        self, step: int, draft: StepMetrics | None, record: Callable[[Digests], object]
    ) -> None:
        """Write the trainer's state, then the checkpoint of the step, then its record.

        A run resumes from the last step that has all three, so that no step lacks a record. State
        and checkpoint are synced to disk after they were published: workers read them from the
        page cache, and the next rollouts do not wait for the disk.
        """
        with put_off_syncs() as unsynced:
            digests = self.learner.save_step(
                self.directory,
                step,
                {
                    "step": step,
                    "versions": dict(self.clock.steps),
                    "played": self.played,
                    "suffix": self.publisher.suffix,
                    "metrics": None if draft is None else draft.to_json(),
                },
            )
            record(digests)
        self._unsynced = unsynced

    async def publish(self, step: int) -> Published:
        """Publish the checkpoint of the step. Raises what `Publisher.publish` raises."""
        started = time()
        published = await self.publisher.publish(self.directory.checkpoint(step), step)
        self.current = published
        self.clock.tick(published.label, step)
        self.recorder.published(published)
        self.directory.event(
            "update", step=step, version=published.version, started=started,
            seconds=published.seconds, pause_seconds=published.pause_seconds,
            workers=list(published.workers),
        )  # fmt: skip
        await self.wait_synced()
        self._syncing = asyncio.create_task(asyncio.to_thread(self._sync))
        return published

    def _sync(self) -> None:
        """Sync the newest checkpoint to disk before older ones are deleted."""
        unsynced, self._unsynced = self._unsynced, None
        if unsynced is not None:
            unsynced.sync()
        self.directory.prune(self.config.loop.keep_checkpoints)

    async def wait_synced(self) -> None:
        """Wait until the published checkpoint is on disk. Raises OSError if writing it failed."""
        syncing, self._syncing = self._syncing, None
        if syncing is not None:
            await syncing

    def report(self, draft: StepMetrics, published: Published) -> None:
        """Complete the metrics of a step and pass them to the run directory, sinks and caller."""
        stored: dict[str, float] = {}
        if (step := published.stored) is not None:
            stored = {"published_bytes": step.nbytes, "published_full_bytes": step.full_bytes}
        metrics = replace(
            draft,
            more={**draft.more, **stored},
            version=published.version,
            pause_seconds=published.pause_seconds,
            time_update=published.seconds,
            workers=published.workers,
        )
        self.metrics.append(metrics)
        self.directory.metrics(metrics.to_json())
        self.sinks.step(metrics)
        if self.on_step is not None:
            self.on_step(metrics)
