"""The sampler of a GRPOTrainer or RLOOTrainer: completions and conversations from a fleet."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoint.probe import builtin
from lockstep.client.chat import Chat
from lockstep.engine import exact as exactness
from lockstep.engine import sharded
from lockstep.engine.forward_pass import token_logprobs
from lockstep.engine.probe import remember, save_adapter, save_checkpoint
from lockstep.engine.sharded.ranks import Ranks
from lockstep.engine.weights.published import is_sharded
from lockstep.integrations.draws import DrawnRows, check_recorded
from lockstep.integrations.trl.exact_head import use_own_head
from lockstep.integrations.trl.exact_trainer import (
    learn_in_one_pass,
    measure_recomputed_logprobs,
    why_not_exact,
)
from lockstep.integrations.trl.served_policy import ServedPolicy
from lockstep.integrations.trl.sharded_model import check_sharding, shard_model
from lockstep.integrations.trl.supported_trainers import check_supported, recomputes_logprobs
from lockstep.tokens import Completion, Sample
from lockstep.tokens.errors import BadRequest, NotExact, RolloutFailed, UpdateFailed
from lockstep.train.failure import one_error
from lockstep.train.learning.exactness import CLOSE_BOUND, check_same_base
from lockstep.train.publish import Published
from lockstep.train.rollout import seed_of

log = logging.getLogger(__name__)
Play = Callable[[Chat, Any], Awaitable[Mapping[str, Any] | None]]
"""Runs one conversation about a prompt; its result goes to the reward functions."""
ADAPTER = "trl-policy"
PUBLISH_SECONDS = 1800.0
"""How long a rank waits until rank 0 has published: retries, staging and proofs."""


class LockstepGeneration:
    """The generation object of a GRPOTrainer or RLOOTrainer, in place of vLLM's.

        lockstep = LockstepGeneration()
        trainer = GRPOTrainer(model=..., args=..., reward_funcs=..., train_dataset=...)
        lockstep.attach(trainer)
        trainer.train()

    `options` are those of `ServedPolicy`; `checkpoints` defaults to the trainer's output_dir.
    """

    def __init__(
        self, url: str = "http://127.0.0.1:8000", model: str | None = None, **options: Any
    ):
        self._options_of_policy = {"url": url, "model": model, **options}
        self._calls: Counter[tuple[str, int]] = Counter()
        self._sampled: list[Completion] = []
        self._draws = DrawnRows()

    def attach(self, trainer: Any, *, exact: bool | None = None, shard: bool = False) -> None:
        """Make the trainer sample from the fleet, and publish its weights whenever they changed.

        With `exact` the trainer's model computes what the workers compute, bit for bit. That is the
        default where possible; it is also faster, as neither padding nor a shared prompt is
        computed twice. With `shard` the ranks of torchrun share out the model by FSDP2, and all of
        them write its checkpoints.

        Raises NotExact if it is required and impossible, BadRequest for a trainer of another kind
        or one that accelerate shards, and Conflict for an adapter on another base model than the
        served one.
        """
        check_supported(trainer)
        check_sharding(trainer, shard=shard)
        self._trainer, self._model = trainer, trainer.model
        is_adapter = hasattr(trainer.model, "peft_config")
        options = {
            "checkpoints": Path(trainer.args.output_dir) / "lockstep",
            "adapter": ADAPTER if is_adapter else None,
            **self._options_of_policy,
        }
        self.policy = ServedPolicy(**options)
        self.policy.describe(
            trainer.args.to_dict(),
            trainer.model.config._name_or_path,
            samples_all=trainer.accelerator.num_processes == 1,
        )
        self.policy.open(
            tokenizer=trainer.processing_class, publishes=trainer.accelerator.is_main_process
        )
        is_exact = exact is not False and self._make_exact(required=exact is True)
        self._use_own_heads(exact=is_exact)
        if recomputes_logprobs(trainer):
            measure_recomputed_logprobs(trainer, self._take_sampled, exact=is_exact)
        elif is_exact:
            learn_in_one_pass(trainer)
        if is_adapter and trainer.accelerator.is_main_process:
            self._check_base(is_exact)
        if shard:
            shard_model(trainer)
        # The fleet serves these weights now: their logprobs show how closely its workers follow.
        if shard or trainer.accelerator.is_main_process:
            remember(self._model)
        # TRL decides by these attributes alone whether and with what it samples.
        trainer.use_vllm, trainer.vllm_mode = True, "server"
        trainer.vllm_generation, trainer._last_loaded_step = self, -1

    def close(self) -> None:
        """Close the connections, after training."""
        self.policy.close()

    def _make_exact(self, *, required: bool) -> bool:
        """Return whether the trainer now computes the bits of the workers."""
        try:
            self._check_exact()
            exactness.prepare(self._model)
        except NotExact as error:
            if required:
                raise
            log.info("close mode: trainer and workers do not agree bit for bit: %s", error)
            return False
        return True

    def _use_own_heads(self, *, exact: bool) -> None:
        """Score tokens as they were drawn, with the policy and with the reference model."""
        temperature, reference = self._trainer.args.temperature, self._trainer.ref_model
        use_own_head(self._model, temperature, self._draws, exact=exact)
        if reference is not None:
            use_own_head(reference, temperature, self._draws, exact=False)

    def _check_exact(self) -> None:
        """Raise NotExact if the trainer and the workers do not compute the same bits."""
        if problem := why_not_exact(self._trainer):
            raise NotExact(f"this trainer cannot compute the same bits as the workers: {problem}")
        worker = self.policy.run(self.policy.facts()).get("numerics")
        if worker is None:
            raise NotExact("the workers do not report their numerics: attach with exact=False")
        base = Path(self._model.config.get_text_config()._name_or_path or self._model.name_or_path)
        exactness.check_plan(worker, exactness.own_plan(base, device=str(self._model.device)))

    def _check_base(self, is_exact: bool) -> None:
        """Raise Conflict if the fleet serves another base model than the adapter's.

        Without this check every adapter would fail its proof, which is retried.
        """
        model = self._model
        text, was_training = model.config.get_text_config(), model.training
        ids = list(builtin(text.vocab_size, text.max_position_embeddings)[1])
        with torch.no_grad(), model.disable_adapter():
            (logprobs,) = token_logprobs(model.eval(), [ids])
        model.train(was_training)
        bound = 0.0 if is_exact else CLOSE_BOUND.get(str(model.dtype).removeprefix("torch."), 0.5)
        scores = self.policy.run(self.policy.base_scores(ids))
        check_same_base(logprobs.tolist(), scores, bound, model.name_or_path)

    # Called by TRL

    def sync_weights(self) -> None:
        """Publish the trainer's weights: rank 0 publishes, and the other ranks wait for it.

        Raises what the fleet raises on rank 0, and UpdateFailed on the others.
        """
        accelerator = self._trainer.accelerator
        if accelerator.num_processes == 1:
            self.policy.publish(self._save)
            return
        ranks = Ranks(PUBLISH_SECONDS)
        directory: Path | None = None
        if is_sharded(self._model):
            names = [str(self.policy.next_checkpoint())] if accelerator.is_main_process else []
            directory = Path(ranks.exchange("named the checkpoint", names)[0][0])
            sharded.save_checkpoint(self._model, directory, version=directory.name)
        result: dict[str, Any] = {}
        failure: Exception | None = None
        if accelerator.is_main_process:
            try:
                published = (
                    self.policy.publish(self._save)
                    if directory is None
                    else self.policy.publish_saved(directory)
                )
                result = {"published": published.to_json()}
            except Exception as error:  # the other ranks must not wait for this one
                failure, result = error, {"error": f"{type(error).__name__}: {error}"}
        # At a store, not in a collective operation, because an inference engine works meanwhile.
        result = ranks.exchange("published the weights", result)[0]
        if failure is not None:
            raise failure
        if "error" in result:
            raise UpdateFailed(
                f"rank 0 could not publish the weights of {type(self._model).__name__}: "
                f"{result['error']}"
            )
        self.policy.published = Published.from_json(result["published"])

    def _save(self, directory: Path, version: str) -> None:
        if self.policy.adapter is not None:
            save_adapter(self._model, directory, name=self.policy.adapter, version=version)
        else:
            save_checkpoint(self._model, directory, version=version)

    def generate(
        self, prompts: list[list[int]], images: Any, num_generations: int, profiler: Any = None
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], list[list[list[int]]]]:
        """Return prompts, completions, and the processed logprob and id of every sampled token.

        There is one row per prompt, in order. Raises BadRequest for images, BadSupport where the
        workers did not record what tokens were drawn from, and what the fleet raises.
        """
        if images is not None and any(images):
            raise BadRequest("images are not supported: train on text only", param="images")
        with profiler or nullcontext():
            rows = self.policy.run(self._complete_all(prompts))
        self._sampled = rows
        for row in rows:
            self._remember(row)
        return (
            prompts,
            [list(row.token_ids) for row in rows],
            [[[value] for value in row.logprobs] for row in rows],
            [[[token] for token in row.token_ids] for row in rows],
        )

    async def _complete_all(self, prompts: list[list[int]]) -> list[Completion]:
        """Complete all prompts; equal neighbours are one request with several choices."""
        options, seed = self._options(), self._next_seeds()
        runs = [(ids, len(list(same))) for ids, same in itertools.groupby(prompts)]
        with one_error():
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self.policy.complete(ids, n, seed=seed(at), **options))
                    for at, (ids, n) in enumerate(runs)
                ]
        return [completion for task in tasks for completion in task.result()]

    def _remember(self, drawn: Completion | Sample) -> None:
        """Keep what tokens were drawn from, for the passes of the trainer. Raises BadSupport."""
        check_recorded(drawn)
        self._draws.add(drawn)

    def _take_sampled(self) -> list[Completion]:
        """Return what the last `generate` sampled, once."""
        sampled, self._sampled = self._sampled, []
        return sampled

    def _next_seeds(self) -> Callable[[int], int]:
        """Return the seeds of the next generation by row.

        They depend on the step and on how many generations this step had, so that a run resumed
        from a checkpoint draws what an uninterrupted run draws. Evaluations count on their own.
        """
        trainer = self._trainer
        step, mode = trainer.state.global_step, "train" if trainer.model.training else "eval"
        number = self._calls[mode, step]
        self._calls[mode, step] += 1
        return partial(
            seed_of, trainer.args.seed, mode, step, trainer.accelerator.process_index, number
        )

    def _options(self) -> dict[str, Any]:
        """Return the trainer's sampling options as options of a request."""
        args, ends = self._trainer.args, self._trainer.processing_class.eos_token_id
        values = {
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
        options = {name: value for name, value in values.items() if value is not None}
        return {**options, **self.policy.version_pin()}

    # Conversations

    def rollout_func(
        self, play: Play, **options: Any
    ) -> Callable[[list[Any], Any], dict[str, Any]]:
        """Return a `rollout_func` for GRPOTrainer that runs a conversation for each row.

        `play(chat, prompt)` sends the prompt and the results of tools. `options` are those of
        `Policy.chat`, such as tools. Rows hold the sampled ids and a mask that leaves out the
        environment's tokens. The reward functions get `weight_version` and what `play` returns.
        """
        return partial(self._run_rollouts, play, options)

    def _run_rollouts(
        self, play: Play, options: Mapping[str, Any], prompts: list[Any], trainer: Any
    ) -> dict[str, Any]:
        if getattr(self, "_trainer", None) is not trainer:
            raise BadRequest("rollout_func needs its trainer: call attach(trainer) before train()")
        rollouts = self.policy.run(self._converse_all(play, options, prompts))
        for sample, _ in rollouts:
            self._remember(sample)
        rows = [sample_row(sample) for sample, _ in rollouts]
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        extra = [dict(outcome or {}) for _, outcome in rollouts]
        for name in sorted(set().union(*extra)):
            if name in columns:
                raise BadRequest(f"play returned {name!r}, which is a column of TRL: rename it")
            columns[name] = [outcome.get(name) for outcome in extra]
        return columns

    async def _converse_all(
        self, play: Play, options: Mapping[str, Any], prompts: Sequence[Any]
    ) -> list[tuple[Sample, Mapping[str, Any] | None]]:
        merged, seed = {**self._options(), **options}, self._next_seeds()

        async def converse(chat: Chat, prompt: Any) -> Mapping[str, Any] | None:
            return await play(chat, prompt)

        with one_error():
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(
                        self.policy.converse(
                            partial(converse, prompt=prompt), **merged, seed=seed(at)
                        )
                    )
                    for at, prompt in enumerate(prompts)
                ]
        return [task.result() for task in tasks]


def sample_row(sample: Sample) -> dict[str, Any]:
    """Return a sample as columns of TRL. Raises RolloutFailed if it has no sampled token."""
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
