"""One training step: learn from a batch, save the weights, have the fleet serve them, report."""

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
from lockstep.train.learning.distill import teacher_logprobs
from lockstep.train.learning.exactness import Exactness
from lockstep.train.learning.learner import Learner
from lockstep.train.publish import Published, Publisher
from lockstep.train.records.metrics import StepMetrics, nothing_learnt, step_metrics
from lockstep.train.records.run_dir import RunDirectory
from lockstep.train.records.sinks import Sinks
from lockstep.train.records.transcript import transcripts

OnStep = Callable[[StepMetrics], None]
InThread = Callable[..., Awaitable[Any]]
"""Runs a function of torch in the one thread that torch has."""


@dataclass(slots=True, kw_only=True)
class StepRunner:
    """Takes the steps of one run.

    `current` is what the fleet serves now, `metrics` those of the steps that this process took,
    and `clock` knows the versions that this run has published.
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
    clock: Clock = field(default_factory=Clock)
    metrics: list[StepMetrics] = field(default_factory=list)
    current: Published = field(init=False)
    skipped: int = 0
    """Steps in a row that had nothing to learn from."""
    _publishing: asyncio.Task[None] | None = None
    _unsynced: PutOffSyncs | None = None
    _syncing: asyncio.Task[None] | None = None
    _reported: float = 0.0

    async def take(
        self,
        step: int,
        groups: list[RolloutGroup],
        begun: float,
        max_off_policy: int,
        late: int = 0,
        on_served: Callable[[], None] | None = None,
    ) -> None:
        """One step on groups that were all played since `begun`; `late` samples were dropped.

        With `on_served` it returns once the weights are saved: the fleet updates to them while the
        next step is learnt, and `on_served` is called when it serves them, proved. The next step is
        not saved before that.

        Raises Conflict when too many steps in a row had nothing to learn from, NotExact when
        exactness was demanded and did not hold, and what the fleet raises.
        """
        rollout_seconds = perf_counter() - begun
        await self.settle_for(groups)
        if causes := failures(groups):
            self.directory.event("failed_rollouts", step=step, causes=causes)
        batch = make_batch(groups, self.clock, step - 1, self.config, max_off_policy)
        batch = replace(batch, dropped=batch.dropped + late)
        if not batch.learnt_tokens:
            await self.settle()
            self._skip(step, batch, rollout_seconds)
            if on_served is not None:
                on_served()
            return
        self.skipped = 0
        batch = await self._with_teacher(batch)
        at = perf_counter()
        outcome = await self.in_thread(self.learner.step, batch, step)
        draft = step_metrics(step, batch, outcome, rollout_seconds, perf_counter() - at)
        self._check_mismatch(draft)
        await self.settle()  # what is saved for resuming names every version before it
        await self.synced()
        at = perf_counter()
        await self.in_thread(self.save, step, draft)
        save_seconds = perf_counter() - at
        env, shown = self.config.env.name, self.config.rollout.samples_shown
        tokenizer = self.policy.renderer().tokenizer
        self.directory.samples(transcripts(step, env, batch, outcome.logprobs, tokenizer, shown))
        draft = replace(draft, time_save=save_seconds)
        if on_served is None:
            await self._serve(draft, begun)
        else:
            self._publishing = asyncio.create_task(self._serve(draft, begun, on_served))

    async def _serve(
        self, draft: StepMetrics, begun: float, on_served: Callable[[], None] | None = None
    ) -> None:
        """Publishes the step of the draft and reports it."""
        published = await self.publish(draft.step)
        now = perf_counter()
        # A step that began while the one before it was published takes what it adds.
        total = now - max(begun, self._reported)
        self._reported = now
        rate = draft.tokens / total
        self.report(replace(draft, time_step=total, tokens_per_second=rate), published)
        if on_served is not None:
            on_served()

    async def settle(self) -> None:
        """Returns when the fleet serves all that was taken; raises what publishing it raised."""
        publishing, self._publishing = self._publishing, None
        if publishing is not None:
            await publishing

    async def settle_for(self, groups: Sequence[RolloutGroup]) -> None:
        """Settles where a token was sampled under weights whose update is not reported yet: a
        worker serves them before the fleet has told of it."""
        known = self.clock.steps
        samples = (sample for group in groups for each in group.rollouts for sample in each.samples)
        if any(span.version not in known for sample in samples for span in sample.versions):
            await self.settle()

    @asynccontextmanager
    async def overlapping(self) -> AsyncIterator[None]:
        """All that is taken within the block is served after it; nothing is published any more when
        the block raises."""
        try:
            yield
            await self.settle()
        finally:
            if self._publishing is not None:
                self._publishing.cancel()
                with suppress(asyncio.CancelledError, LockstepError):  # the block's own error tells
                    await self._publishing

    async def _with_teacher(self, batch: TrainBatch) -> TrainBatch:
        """The batch with the teacher's logprobs of every sample, where the run has a teacher."""
        if self.teacher is None:
            return batch
        samples = [item.sample for item in batch.items]
        temperature = self.config.rollout.temperature
        scores = await teacher_logprobs(self.teacher, samples, temperature=temperature)
        pairs = zip(batch.items, scores, strict=True)
        return replace(batch, items=tuple(replace(item, teacher=s) for item, s in pairs))

    def _skip(self, step: int, batch: TrainBatch, rollout_seconds: float) -> None:
        """Records a step without a token to learn from; the weights stay as they are.

        Raises Conflict when there were more of them in a row than the config allows.
        """
        self.skipped += 1
        reason = (
            f"no token to learn from: {batch.dropped} samples were dropped "
            f"({batch.aborts} aborts, {batch.mixed} of mixed versions)"
        )
        self.directory.event("skipped", step=step, in_a_row=self.skipped, reason=reason)
        if self.skipped > self.config.loop.max_skipped:
            raise Conflict(
                f"step {step} had {reason}, and so had all of the last {self.skipped} steps; "
                f"loop.max_skipped allows {self.config.loop.max_skipped} in a row: look at "
                "loop.aborted, loop.mixed and loop.max_off_policy, and at the fleet's events",
                param="loop.max_skipped",
            )
        self.clock.skip()
        same = replace(self.current, seconds=0.0, pause_seconds=0.0)
        self.report(step_metrics(step, batch, nothing_learnt(), rollout_seconds, 0.0), same)

    def _check_mismatch(self, draft: StepMetrics) -> None:
        """Records logprobs of the current weights that differ by more than the bound.

        Raises NotExact for them where exactness was demanded.
        """
        worst, bound = draft.more["mismatch_max"], self.exactness.bound
        # Tokens of older weights differ by what was learnt since: they say nothing of arithmetic.
        if draft.off_policy_max > 0 or worst <= bound:
            return
        self.directory.event("mismatch", step=draft.step, mismatch_max=worst, bound=bound)
        if self.config.learner.exact:
            raise NotExact(
                f"exactness was demanded, and the trainer's logprobs of step {draft.step} are off "
                f"by up to {worst:.3g} from the engine's under the same weights",
                param="learner.exact",
            )

    def save(self, step: int, draft: StepMetrics | None) -> None:
        """Writes the trainer's state, then the checkpoint of the step.

        They reach the disk after they were published: workers read them from memory, and the next
        rollouts do not wait for a disk.
        """
        with put_off_syncs() as unsynced:
            # In this order: where the checkpoint is stable, nothing that resuming needs is missing.
            self.directory.save_state(
                step,
                {
                    **self.learner.state(),
                    "step": step,
                    "versions": dict(self.clock.steps),
                    "suffix": self.publisher.suffix,
                    "metrics": None if draft is None else draft.to_json(),
                },
            )
            self.learner.save(self.directory.checkpoint(step), f"step-{step}")
        self._unsynced = unsynced

    async def publish(self, step: int) -> Published:
        """Has the fleet serve the checkpoint of the step; raises what `Publisher.publish` does."""
        started = time()
        published = await self.publisher.publish(self.directory.checkpoint(step), step)
        self.current = published
        self.clock.tick(published.label, step)
        self.directory.event(
            "update", step=step, version=published.version, started=started,
            seconds=published.seconds, pause_seconds=published.pause_seconds,
            workers=list(published.workers),
        )  # fmt: skip
        await self.synced()
        self._syncing = asyncio.create_task(asyncio.to_thread(self._sync))
        return published

    def _sync(self) -> None:
        """Has the disk hold the newest checkpoint before older ones are deleted."""
        unsynced, self._unsynced = self._unsynced, None
        if unsynced is not None:
            unsynced.sync()
        self.directory.prune(self.config.loop.keep_checkpoints)

    async def synced(self) -> None:
        """Returns when the disk holds what was published. Raises OSError where it could not."""
        syncing, self._syncing = self._syncing, None
        if syncing is not None:
            await syncing

    def report(self, draft: StepMetrics, published: Published) -> None:
        """Completes the metrics of a step; the run directory, the sinks and the caller get them."""
        metrics = replace(
            draft,
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
