"""What GRPOTrainer samples with: completions and conversations of a fleet that has its weights."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.client.chat import Chat
from lockstep.engine import exact as exactness
from lockstep.engine.probe import remember, save_adapter, save_checkpoint
from lockstep.integrations.trl.exact_head import use_exact_head
from lockstep.integrations.trl.exact_trainer import learn_in_one_pass, why_not_exact
from lockstep.integrations.trl.served_policy import ServedPolicy
from lockstep.tokens import Completion, Sample
from lockstep.tokens.errors import BadRequest, NotExact, RolloutFailed, UpdateFailed
from lockstep.train.failure import one_error
from lockstep.train.rollout import seed_of

log = logging.getLogger(__name__)
Play = Callable[[Chat, Any], Awaitable[Mapping[str, Any] | None]]
"""Has one conversation about a prompt; what it returns goes to the reward functions."""
ADAPTER = "trl-policy"


class LockstepGeneration:
    """The generation object of a GRPOTrainer, in the place of vLLM's.

        lockstep = LockstepGeneration()
        trainer = GRPOTrainer(model=..., args=..., reward_funcs=..., train_dataset=...)
        lockstep.attach(trainer)
        trainer.train()

    Takes the options of `ServedPolicy`; `checkpoints` is by default in the trainer's output_dir.
    """

    def __init__(
        self, url: str = "http://127.0.0.1:8000", model: str | None = None, **options: Any
    ):
        self._opening = {"url": url, "model": model, **options}
        self._calls = itertools.count()

    def attach(self, trainer: Any, *, exact: bool | None = None) -> None:
        """Has the trainer sample here, and publish its weights whenever they have changed.

        With `exact` the trainer's model computes as the workers do, bit for bit; by default where
        it can, which is also faster: padding is not computed, and nothing is computed twice. Raises
        NotExact where it was demanded and cannot be, and BadRequest for a trainer whose weights are
        sharded.
        """
        _refuse_sharded(trainer.accelerator)
        self._trainer, self._model = trainer, trainer.model
        is_adapter = hasattr(trainer.model, "peft_config")
        opening = {
            "checkpoints": Path(trainer.args.output_dir) / "lockstep",
            "adapter": ADAPTER if is_adapter else None,
            **self._opening,
        }
        self.policy = ServedPolicy(**opening)
        self.policy.open(
            tokenizer=trainer.processing_class, publishes=trainer.accelerator.is_main_process
        )
        if exact is not False:
            self._make_exact(demanded=exact is True)
        # The fleet serves these weights now: it measures how closely its workers follow them.
        if trainer.accelerator.is_main_process:
            remember(self._model)
        # TRL asks these attributes, and nothing else, whether and with what it samples.
        trainer.use_vllm, trainer.vllm_mode = True, "server"
        trainer.vllm_generation, trainer._last_loaded_step = self, -1

    def close(self) -> None:
        """Ends the connections, after training."""
        self.policy.close()

    def _make_exact(self, *, demanded: bool) -> None:
        try:
            self._check_exact()
            exactness.prepare(self._model)
        except NotExact as error:
            if demanded:
                raise
            log.info("trainer and workers agree closely, not bit for bit: %s", error)
            return
        use_exact_head(self._model, self._trainer.args.temperature)
        learn_in_one_pass(self._trainer)

    def _check_exact(self) -> None:
        """Raises NotExact where the trainer and the workers do not compute the same bits."""
        if problem := why_not_exact(self._trainer):
            raise NotExact(f"this trainer cannot compute as the workers do: {problem}")
        worker = self.policy.run(self.policy.facts()).get("numerics")
        if worker is None:
            raise NotExact("the workers do not say how they compute: attach with exact=False")
        base = Path(self._model.config.get_text_config()._name_or_path or self._model.name_or_path)
        exactness.check_plan(worker, exactness.own_plan(base, device=str(self._model.device)))

    # What TRL calls

    def sync_weights(self) -> None:
        """Publishes the trainer's weights, proved: rank 0 does, and every other waits for it.

        Raises what the fleet raises, UpdateFailed on the other ranks.
        """
        accelerator, model = self._trainer.accelerator, self._model
        if accelerator.num_processes == 1:
            self.policy.publish(self._save)
            return
        from accelerate.utils import broadcast_object_list

        told: list[Any] = [None, None]
        failure: Exception | None = None
        if accelerator.is_main_process:
            try:
                told = [self.policy.publish(self._save), None]
            except Exception as error:  # the other ranks would wait for ever: all of them raise
                failure, told = error, [None, f"{type(error).__name__}: {error}"]
        broadcast_object_list(told)
        if failure is not None:
            raise failure
        if told[1] is not None:
            raise UpdateFailed(f"rank 0 could not publish the weights of {type(model).__name__}: "
                               f"{told[1]}")  # fmt: skip
        self.policy.published = told[0]

    def _save(self, directory: Path, version: str) -> None:
        if self.policy.adapter is not None:
            save_adapter(self._model, directory, name=self.policy.adapter, version=version)
        else:
            save_checkpoint(self._model, directory, version=version)

    def generate(
        self, prompts: list[list[int]], images: Any, num_generations: int, profiler: Any = None
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], list[list[list[int]]]]:
        """Prompts, completions, and the processed logprob and id of every sampled token.

        A row for each prompt, in order. Raises BadRequest for images, and what the fleet raises.
        """
        if images is not None and any(images):
            raise BadRequest("images are not served: train on text", param="images")
        with profiler or nullcontext():
            rows = self.policy.run(self._complete_all(prompts))
        return (
            prompts,
            [list(row.token_ids) for row in rows],
            [[[value] for value in row.logprobs] for row in rows],
            [[[token] for token in row.token_ids] for row in rows],
        )

    async def _complete_all(self, prompts: list[list[int]]) -> list[Completion]:
        """Equal neighbours are one request: their prompt is computed once."""
        options, number = self._options(), next(self._calls)
        runs = [(ids, len(list(same))) for ids, same in itertools.groupby(prompts)]
        with one_error():
            async with asyncio.TaskGroup() as group:
                made = [
                    group.create_task(
                        self.policy.complete(ids, n, seed=self._seed(number, at), **options)
                    )
                    for at, (ids, n) in enumerate(runs)
                ]
        return [completion for task in made for completion in task.result()]

    def _seed(self, *parts: int) -> int:
        trainer = self._trainer
        return seed_of(
            trainer.args.seed, trainer.state.global_step, trainer.accelerator.process_index, *parts
        )

    def _options(self) -> dict[str, Any]:
        """The trainer's own way of sampling, as options of a request."""
        args, ends = self._trainer.args, self._trainer.processing_class.eos_token_id
        chosen = {
            "temperature": args.temperature,
            "top_p": args.top_p,
            "top_k": args.top_k or None,
            "min_p": args.min_p,
            "repetition_penalty": args.repetition_penalty,
            "max_tokens": args.max_completion_length,
            "stop_token_ids": None if ends is None else [ends],
            "logprob_mode": "processed",
            **(args.generation_kwargs or {}),
        }
        options = {name: value for name, value in chosen.items() if value is not None}
        return {**options, **self.policy.pinned()}

    # Conversations

    def rollout_func(
        self, play: Play, **options: Any
    ) -> Callable[[list[Any], Any], dict[str, Any]]:
        """A `rollout_func` for GRPOTrainer that has each row played as a conversation.

        `play(chat, prompt)` sends the prompt and whatever its tools answer. `options` are those of
        `Policy.chat`: tools and the like. Rows hold the ids as they were sampled, with a mask that
        leaves out what the environment said; `weight_version` goes to the reward functions, and so
        does what `play` returns.
        """
        return partial(self._rollouts, play, options)

    def _rollouts(
        self, play: Play, options: Mapping[str, Any], prompts: list[Any], trainer: Any
    ) -> dict[str, Any]:
        if getattr(self, "_trainer", None) is not trainer:
            raise BadRequest("rollout_func needs its trainer: call attach(trainer) before train()")
        played = self.policy.run(self._play_all(play, options, prompts))
        rows = [sample_row(sample) for sample, _ in played]
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        extra = [dict(outcome or {}) for _, outcome in played]
        for name in sorted(set().union(*extra)):
            if name in columns:
                raise BadRequest(f"play returned {name!r}, which is a column of TRL's own")
            columns[name] = [each.get(name) for each in extra]
        return columns

    async def _play_all(
        self, play: Play, options: Mapping[str, Any], prompts: Sequence[Any]
    ) -> list[tuple[Sample, Mapping[str, Any] | None]]:
        merged, number = {**self._options(), **options}, next(self._calls)

        async def one(chat: Chat, prompt: Any) -> Mapping[str, Any] | None:
            return await play(chat, prompt)

        with one_error():
            async with asyncio.TaskGroup() as group:
                made = [
                    group.create_task(
                        self.policy.converse(
                            partial(one, prompt=prompt), **merged, seed=self._seed(number, at)
                        )
                    )
                    for at, prompt in enumerate(prompts)
                ]
        return [task.result() for task in made]


def sample_row(sample: Sample) -> dict[str, Any]:
    """A sample in the columns of TRL. Raises RolloutFailed where nothing was sampled."""
    if not any(sample.sampled_mask):
        raise RolloutFailed("a rollout ended without a sampled token: play must send a message")
    first = sample.sampled_mask.index(True)
    return {
        "prompt_ids": sample.token_ids[:first],
        "completion_ids": sample.token_ids[first:],
        "logprobs": sample.logprobs[first:],
        "env_mask": [int(sampled) for sampled in sample.sampled_mask[first:]],
        "weight_version": sample.versions[0].version,
    }


def _refuse_sharded(accelerator: Any) -> None:
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise BadRequest(
            f"the trainer is distributed by {kind}, and no rank has all of its weights to prove "
            "them with: train with one process or with DDP",
            param="trainer",
        )
