"""Rollouts for AsyncGRPOTrainer: groups of conversations, sampled and scored while it learns."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import queue
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from lockstep.client.chat import Chat
from lockstep.integrations.trl.served_policy import ServedPolicy
from lockstep.tokens import Sample
from lockstep.tokens.errors import BadRequest, BadSupport, BadVersions, Conflict
from lockstep.train.failure import one_error
from lockstep.train.learning.advantages import advantages
from lockstep.train.rollout import seed_of

Play = Callable[[Chat, Mapping[str, Any]], Awaitable[Any]]
RewardFunction = Callable[..., Any]
LABEL_SECONDS = 60.0
"""How long to wait for the report of an update whose weights a token was sampled under."""
POLL_SECONDS = 0.02


class LockstepRolloutWorker:
    """The `rollout_worker` of an AsyncGRPOTrainer.

    Samples each row of `dataset` `num_generations` times, over and over, and scores the group with
    TRL's `reward_funcs` (`f(prompts, completions, **columns) -> list[float]`). `play(chat, row)`
    runs the conversation; by default it sends the row's prompt once.

    The `model_version` of a rollout is that of its oldest token. Rollouts older than
    `max_staleness` versions are dropped. At most `max_ahead` groups are running or buffered, by
    default `groups_per_step * (max_staleness + 1)`.
    """

    def __init__(
        self,
        policy: ServedPolicy,
        dataset: Iterable[Mapping[str, Any]],
        reward_funcs: RewardFunction | Sequence[RewardFunction],
        *,
        num_generations: int = 8,
        groups_per_step: int = 4,
        max_staleness: int = 4,
        max_ahead: int | None = None,
        play: Play | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        """`options` are those of `Policy.chat`, such as temperature, max_tokens and tools."""
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._policy = policy
        self._rows = list(dataset)
        if not self._rows:
            raise BadRequest("dataset is empty: expected at least one row", param="dataset")
        self._rewards = [reward_funcs] if callable(reward_funcs) else list(reward_funcs)
        self._size = num_generations
        self._staleness = max_staleness
        self._ahead = max_ahead or groups_per_step * (max_staleness + 1)
        self._play = play or _send_prompt
        self._seed = seed
        self._options = {"logprob_mode": "processed", **options}
        self._versions: dict[str, int] = {}
        self._now = 0
        self._running: asyncio.Task[None] | None = None
        self._failed: BaseException | None = None
        self._last_finished = time.monotonic()

    # Called by TRL

    def start(self) -> None:
        """Start sampling rollouts."""
        self._policy.open(publishes=False)
        self._last_finished = time.monotonic()
        self._policy.run(self._start())

    def stop(self) -> None:
        """Stop sampling and drop unfinished rollouts."""
        if self._running is not None:
            self._policy.run(self._stop())

    def update_model_version(self, model_version: int) -> None:
        """Record that the weights published last are this version."""
        if self._policy.published is not None:
            self._versions[self._policy.published.label] = model_version
        self._now = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise the error that ended sampling, or Conflict if no rollout finished for so long."""
        if self._failed is not None:
            raise self._failed
        idle = time.monotonic() - self._last_finished
        if idle > stale_after_s:
            raise Conflict(f"no rollout has finished for {idle:.0f} s: see `lockstep state`")

    # Sampling

    async def _start(self) -> None:
        self._running = asyncio.create_task(self._run(), name="rollouts")

    async def _stop(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _run(self) -> None:
        try:
            with one_error():
                async with asyncio.TaskGroup() as group:
                    running: set[asyncio.Task[None]] = set()
                    for number, row in enumerate(itertools.cycle(self._rows)):
                        while len(running) * self._size + self.rollout_buffer.qsize() >= (
                            self._ahead * self._size
                        ):
                            # The trainer empties the buffer in another thread, without a signal.
                            await asyncio.sleep(POLL_SECONDS)
                        task = group.create_task(self._group(number, row))
                        running.add(task)
                        task.add_done_callback(running.discard)
        except Exception as error:
            self._failed = error

    async def _group(self, number: int, row: Mapping[str, Any]) -> None:
        """Sample and score one group, and buffer its rollouts that are not too old."""
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        with one_error():
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._rollout(number, at, row)) for at in range(self._size)
                ]
        rollouts = [task.result() for task in tasks]
        rewards = await self._score(row, [messages for _, messages in rollouts])
        (values,) = advantages([rewards], "group_std")
        opening = _messages(row["prompt"])
        deviation = float(np.std(rewards))
        for (sample, messages), reward, advantage in zip(rollouts, rewards, values, strict=True):
            version = await self._version(sample)
            if self._now - version > self._staleness:
                self.metrics_queue.put({"rollout/left_out_stale_total": 1.0})
                continue
            arrays = sample.numpy()
            self.rollout_buffer.put(
                RolloutSample(
                    prompt=opening,
                    completion=messages,
                    input_ids=arrays["token_ids"],
                    completion_mask=arrays["sampled_mask"].astype(np.int64),
                    old_log_probs=arrays["logprobs"],
                    advantage=advantage,
                    model_version=version,
                    group_id=number,
                    metrics={"reward": reward, "reward_std": deviation},
                    enqueued_at=time.time(),
                )
            )
        self._last_finished = time.monotonic()

    async def _rollout(
        self, number: int, at: int, row: Mapping[str, Any]
    ) -> tuple[Sample, list[Any]]:
        prompt_length = len(_messages(row["prompt"]))

        async def converse(chat: Chat) -> list[Any]:
            await self._play(chat, row)
            return list(chat.messages[prompt_length:])

        seed = seed_of(self._seed, number, at)
        sample, messages = await self._policy.converse(converse, **self._options, seed=seed)
        check_unshaped(sample)
        return sample, messages

    async def _score(self, row: Mapping[str, Any], completions: list[list[Any]]) -> list[float]:
        """Return the sum of all reward functions for each completion, as TRL sums them."""
        prompt, count = row["prompt"], len(completions)
        columns = {name: [value] * count for name, value in row.items() if name != "prompt"}
        texts: list[Any] = completions
        if isinstance(prompt, str):
            texts = [
                "".join(message.get("content") or "" for message in messages)
                for messages in completions
            ]
        total = [0.0] * count
        for function in self._rewards:
            call = partial(function, prompts=[prompt] * count, completions=texts, **columns)
            values = (
                await call()
                if inspect.iscoroutinefunction(function)
                else await asyncio.to_thread(call)
            )
            if len(values) != count:
                name = getattr(function, "__name__", type(function).__name__)
                raise BadRequest(
                    f"reward function {name} returned {len(values)} values for {count} completions",
                    param="reward_funcs",
                )
            total = [so_far + (value or 0.0) for so_far, value in zip(total, values, strict=True)]
        return total

    async def _version(self, sample: Sample) -> int:
        """Return the model version of the oldest token of a sample.

        Raises BadVersions for weights that were not published through this policy.
        """
        until = time.monotonic() + LABEL_SECONDS
        labels = {span.version for span in sample.versions}
        # Tokens of new weights may arrive before the trainer reports that its update is done.
        while unknown := labels - self._versions.keys():
            if time.monotonic() > until:
                raise BadVersions(
                    f"tokens were sampled under {', '.join(sorted(unknown))}, which this trainer "
                    "has not published: use one ServedPolicy for rollout_worker and "
                    "weight_transfer, and no other trainer on this fleet"
                )
            await asyncio.sleep(POLL_SECONDS)
        return min(self._versions[label] for label in labels)


def check_unshaped(sample: Sample) -> None:
    """Raise BadSupport for tokens whose distribution was shaped by more than the temperature.

    AsyncGRPOTrainer computes logprobs of the whole distribution and cannot be given another.
    """
    if sample.shaping:
        raise BadSupport(
            f"tokens were drawn with {sample.shaping[0].shaping.changes}, but AsyncGRPOTrainer "
            "computes their logprobs without: sample without these options, or train with "
            "GRPOTrainer and LockstepGeneration, which replay them"
        )


async def _send_prompt(chat: Chat, row: Mapping[str, Any]) -> None:
    await chat.send(_messages(row["prompt"]))


def _messages(prompt: Any) -> list[Any]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
