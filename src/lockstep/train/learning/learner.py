"""The learner: an optimizer step over a batch, checkpoints, and the state for resuming.

In exact mode its logprobs equal those of an engine with the same weights, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.engine import exact
from lockstep.engine.config import ModelConfig
from lockstep.engine.expert_replay import ExpertReplay
from lockstep.engine.forward_pass import Ints
from lockstep.engine.numerics import plan as numerics
from lockstep.engine.numerics.bf16 import make_bf16_safe
from lockstep.engine.numerics.block_shapes import row_multiple
from lockstep.engine.options import EngineOptions
from lockstep.engine.probe import remember, save_adapter, save_checkpoint
from lockstep.engine.text.grammars import Grammars
from lockstep.engine.weights.load_model import load_model
from lockstep.models import bundled
from lockstep.tokens.errors import BadRequest, CheckpointError, Conflict
from lockstep.tokens.numerics import NumericsPlan
from lockstep.train.config import TrainConfig
from lockstep.train.learning.batch import TrainBatch, TrainItem
from lockstep.train.learning.distributions import LocalTeacher, distributions
from lockstep.train.learning.item_logprobs import ItemLogprobs, sampled_at
from lockstep.train.learning.optimizer import Optimizer
from lockstep.train.learning.reference import ReferenceModel
from lockstep.train.learning.schedule import learning_rate
from lockstep.train.learning.tally import Tally
from lockstep.train.learning.teacher import reverse_kl, teacher_advantages
from lockstep.train.losses.corrections import correct
from lockstep.train.losses.ratio import Ratio
from lockstep.train.losses.reference_kl import reference_kl
from lockstep.train.records.run_dir import RunDirectory
from lockstep.train.records.tensor_digests import Digests, TensorDigests


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The result of a step: metrics, and the trainer's logprobs of each item's tokens."""

    metrics: dict[str, float]
    logprobs: list[list[float]]
    passes: tuple[tuple[int, ...], ...] = ()
    """Indices of the items of each forward pass."""


@dataclass(frozen=True, slots=True)
class LearntPass:
    """The summed loss of a forward pass, the trainer's logprobs of the sampled tokens (N,), and how
    many tokens of each item no correction rejected."""

    loss: Tensor
    trainer_N: Tensor
    kept_counts: list[int]


@dataclass(frozen=True, slots=True)
class PassResult:
    """The figures of a pass whose gradients were added: those of `LearntPass`, and its metrics."""

    loss: float
    logprobs: list[float]
    kept_counts: list[int]
    tally: Tally = field(default_factory=Tally)


class Learner:
    """A transformers causal LM under AdamW, trained in full or through LoRA.

    `weights` is the directory to start from: by default the config's model, when resuming the
    checkpoint. With `exact` the model computes as the engine does. Raises BadRequest when there is
    no model.
    """

    def __init__(self, config: TrainConfig, *, exact: bool, weights: Path | None = None):
        self._config = config
        learner = config.learner
        if learner.device == "cpu" and learner.dtype != "float32":
            make_bf16_safe()
        torch.set_num_threads(learner.threads)
        torch.manual_seed(config.seed)
        self.exact = exact
        self.model = self._load(weights)
        self._plan = config.loss_plan
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = self._new_optimizer(trained)
        self._trained = trained
        replay = ExpertReplay(self.model) if _is_moe(self.model) else None
        if replay and learner.replay_experts and config.rollout.experts is False:
            raise BadRequest(
                f"rollout.experts is false, but {config.model!r} is a mixture of experts whose "
                "routing the learner replays: leave rollout.experts out, or set "
                "learner.replay_experts to false",
                param="rollout.experts",
            )
        directory = _model_directory(config)
        vocab = self.model.config.get_text_config().vocab_size
        grammars = Grammars.of(directory, vocab)
        self._scorer = ItemLogprobs(self.model, config, grammars, replay)
        self._reference: ReferenceModel | None = None
        if config.reference.weight:
            model = self.model if learner.lora_rank else self._load(None).requires_grad_(False)
            scorer = ItemLogprobs(model, config, grammars, replay if model is self.model else None)
            self._reference = ReferenceModel(model, config, scorer)
        self._teacher: LocalTeacher | None = None
        if config.teacher.path is not None:
            self._teacher = self._load_teacher(config.teacher.path, grammars)
        # The fleet serves these weights before the first step. Their logprobs in the first probe
        # tell new weights from old, and show how closely each worker follows.
        remember(self.model)

    def _new_optimizer(self, trained: Sequence[Tensor]) -> Optimizer:
        return Optimizer(trained, self._config.learner)

    def _load(self, weights: Path | None) -> Any:
        learner = self._config.learner
        base = _model_directory(self._config)
        if weights is not None and not learner.lora_rank:
            base = weights
        model = load_model(base, getattr(torch, learner.dtype)).to(learner.device).train()
        if learner.lora_rank:
            model = self._with_adapter(model, weights)
        return exact.prepare(model) if self.exact else model

    def _load_teacher(self, path: str, grammars: Grammars) -> LocalTeacher:
        learner = self._config.learner
        directory = model_directory(path, "teacher.path")
        model = load_model(directory, getattr(torch, learner.dtype)).to(learner.device)
        model = model.eval().requires_grad_(False)
        LocalTeacher.check_vocabulary(model, self.model, path)
        if self.exact:
            exact.prepare(model)
        return LocalTeacher(ItemLogprobs(model, self._config, grammars, None))

    def _with_adapter(self, model: Any, weights: Path | None) -> Any:
        from peft import LoraConfig, PeftModel, get_peft_model

        learner = self._config.learner
        if weights is not None:
            return PeftModel.from_pretrained(
                model, weights, is_trainable=True, autocast_adapter_dtype=False
            )
        adapter = LoraConfig(
            r=learner.lora_rank,
            lora_alpha=learner.lora_alpha,
            target_modules=list(learner.lora_targets),
            task_type="CAUSAL_LM",
        )
        # Workers hold an adapter in the dtype of the model, so the trainer must as well.
        try:
            return get_peft_model(model, adapter, autocast_adapter_dtype=False)
        except ValueError as error:
            raise BadRequest(
                f"learner.lora_targets is {list(learner.lora_targets)}: {error}",
                param="learner.lora_targets",
            ) from None

    # One step

    def step(self, batch: TrainBatch, number: int) -> StepOutcome:
        """Take an optimizer step on the batch. Raises Conflict when no token can be learnt from."""
        if not batch.learnt_tokens:
            raise Conflict(
                f"step {number} has no token to learn from: {batch.dropped} samples were dropped "
                f"({batch.aborts} aborts, {batch.mixed} of mixed versions)"
            )
        while True:
            learnt, tally = self._accumulate(batch)
            norm = self._optimizer.clip()
            if math.isfinite(norm):
                break
            if not self._optimizer.lower_scale():
                raise Conflict(
                    f"the gradient norm of step {number} is {norm}: the weights are unchanged"
                )
        rate = learning_rate(self._config.learner, number, self._config.loop.steps)
        self._optimizer.step(rate)
        if self._reference is not None:
            self._reference.follow(self.model)
        metrics = {**tally.means(), **learnt.metrics, "grad_norm": norm, "lr": rate}
        return replace(learnt, metrics=metrics)

    def _accumulate(self, batch: TrainBatch) -> tuple[StepOutcome, Tally]:
        """Add up the gradients of all passes over the batch."""
        # Positions that nothing predicts are not scored, so they do not count.
        counted = [int(item.learn_T[sampled_at(item)].sum()) for item in batch.items]
        total = self._plan.denominator.count(counted) or 1
        tally, loss_sum, kept_counts = Tally(), 0.0, [0] * len(counted)
        self._optimizer.zero_grad()
        logprobs = [[0.0] * len(item.sample.token_ids) for item in batch.items]
        passes = self._scorer.passes(batch.items)

        def learn_pass(indices: Sequence[int]) -> PassResult:
            """Add the gradients of one pass."""
            items = [batch.items[at] for at in indices]
            result_tally = Tally()
            learnt = self._learn(items, [sampled_at(item) for item in items], result_tally)
            (learnt.loss * (self._optimizer.scale / total)).backward()
            loss = float(learnt.loss.detach())
            return PassResult(loss, learnt.trainer_N.tolist(), learnt.kept_counts, result_tally)

        for indices, result in zip(passes, self._run_passes(passes, learn_pass), strict=True):
            loss_sum += result.loss
            tally.merge(result.tally)
            values = iter(result.logprobs)
            for at, own in zip(indices, result.kept_counts, strict=True):
                kept_counts[at] = own
                for token in sampled_at(batch.items[at]):
                    logprobs[at][token] = next(values)
        if self._plan.rejected == "leave":
            total = self._rescale_gradients(total, kept_counts)
        metrics = {"loss": loss_sum / total}
        if tops := [item.teacher_top for item in batch.items if item.teacher_top is not None]:
            metrics["teacher_bytes"] = sum(own.nbytes for own in tops)
        if self._plan.corrections:
            metrics |= {"tokens_learnt": sum(counted), "tokens_kept": sum(kept_counts)}
        return StepOutcome(metrics, logprobs, tuple(map(tuple, passes))), tally

    def _run_passes(
        self, passes: Sequence[list[int]], learn_pass: Callable[[Sequence[int]], PassResult]
    ) -> list[PassResult]:
        """Return the results of all passes, in order; their gradients are added in this order."""
        return [learn_pass(indices) for indices in passes]

    def _rescale_gradients(self, total: float, kept_counts: list[int]) -> float:
        """Divide the gradients by what the tokens count that were not rejected, instead of `total`.

        Return the new divisor. Where all tokens were rejected, the gradients are 0 already.
        """
        remaining = self._plan.denominator.count(kept_counts) or total
        for parameter in self._trained:
            if parameter.grad is not None:
                parameter.grad.mul_(total / remaining)
        return remaining

    def _learn(self, items: list[TrainItem], positions: list[Ints], tally: Tally) -> LearntPass:
        """Return the loss of one pass over some items, and the logprobs of their sampled tokens.

        `positions[i]` are those of the sampled tokens of item i. Losses are computed in float64, so
        that they are those of the formulas whatever the type of the model.
        """
        plan, device = self._plan, self.model.device

        def flatten(rows: Iterable[Any], dtype: Any) -> Tensor:
            parts = [np.asarray(row, dtype)[at] for row, at in zip(rows, positions, strict=True)]
            return torch.from_numpy(np.concatenate(parts)).to(device)

        lengths = [len(at) for at in positions]
        engine_N = flatten((item.sample.logprobs for item in items), np.float32)
        learn_N = flatten((item.learn_T for item in items), np.bool_)
        scored_N, entropy_N, whole_NV = self._scorer.score_whole(items, positions)
        # A token that these weights could not draw under its options has no ratio to learn from.
        drawable_N = scored_N > -torch.inf
        counted_N, learn_N = learn_N, learn_N & drawable_N
        scored_N = torch.where(drawable_N, scored_N, engine_N)
        trainer_N, sampler_N = scored_N.double(), engine_N.double()
        metrics_N = {"entropy": entropy_N}

        def per_item(values: Iterable[float]) -> Tensor:
            row = torch.tensor(list(values), dtype=torch.float64)
            return row.repeat_interleave(torch.tensor(lengths)).to(device)

        compared: dict[str, Tensor] = {}
        if plan.loss.learns_from == "distributions":
            advantages_N = torch.zeros_like(trainer_N)
            student, teacher = distributions(whole_NV, items, positions, self._teacher)
            compared = {"student_distribution": student, "teacher_distribution": teacher}
        elif plan.loss.learns_from == "teacher":
            teacher_N = flatten((item.teacher or [] for item in items), np.float32)
            advantages_N = teacher_advantages(trainer_N, teacher_N)
            metrics_N["ref_kl"] = reverse_kl(trainer_N, teacher_N)
        else:
            advantages_N = per_item(item.advantage for item in items)
        corrected = correct(trainer_N - sampler_N, learn_N, lengths, plan.corrections)
        token_loss = plan.loss(
            {
                "logprobs": trainer_N,
                "old_logprobs": trainer_N.detach() if plan.decoupled else sampler_N,
                "advantages": advantages_N,
                "token_mask": learn_N,
                "weights": per_item(max(item.reward, 0.0) for item in items),
                "sequence_ratio_mask": learn_N.to(trainer_N.dtype),
                "lengths": lengths,
                **compared,
            },
            plan.options,
        )
        losses_N = token_loss.values
        if self._reference is not None:
            reference_N = self._reference.logprobs(items, positions).double()
            penalty = self._config.reference
            losses_N = losses_N + penalty.weight * reference_kl(
                penalty.estimator, trainer_N, reference_N
            )
            metrics_N["reference_kl"] = reference_kl("k3", trainer_N.detach(), reference_N)
        ratio = Ratio.of(scored_N.detach(), engine_N)
        tally.add(ratio, advantages_N, learn_N, {**metrics_N, **token_loss.metrics})
        for name, touched_N in corrected.touched_N.items():
            tally.count(f"touched_{name}", touched_N)
        counts = corrected.keep_N if plan.rejected == "leave" else counted_N
        weight_N = corrected.weight_N * plan.denominator.shares(counts, lengths)
        # Not every loss takes the mask. `where` and not a product: 0 times infinity is NaN.
        values_N = torch.where(corrected.keep_N, losses_N * weight_N, 0.0)
        kept_counts = [int(own.sum()) for own in corrected.keep_N.split(lengths)]
        return LearntPass(values_N.sum(), scored_N.detach(), kept_counts)

    def base_logprobs(self, token_ids: list[int]) -> list[float]:
        """Return the logprobs of the tokens after the first, without the adapter."""
        with torch.no_grad(), self.model.disable_adapter():
            (row,) = exact.token_logprobs(self.model, [token_ids])
        logprobs: list[float] = row.tolist()
        return logprobs

    # Checkpoints and state

    def save_step(self, directory: RunDirectory, step: int, facts: Mapping[str, Any]) -> Digests:
        """Write the state with the `facts` of the run, then the checkpoint of the step.

        Return the digests of what the step left behind. When the checkpoint is stable, everything
        needed to resume exists.
        """
        with TensorDigests(self.tensors()) as digests:
            directory.save_state(step, {**self.state(), **facts})
            checkpoint = directory.checkpoint(step)
            self.save(checkpoint, f"step-{step}")
            return digests.collect(checkpoint)

    def load_step(self, directory: RunDirectory, step: int) -> dict[str, Any]:
        """Load the state of a step; return it with the facts of the run."""
        state = directory.load_state(step)
        self.load_state(state)
        return state

    def digests(self, checkpoint: Path) -> Digests:
        """Return the digests of the tensors, whose weights were saved to `checkpoint`."""
        with TensorDigests(self.tensors()) as digests:
            return digests.collect(checkpoint)

    def save(self, directory: Path, version: str) -> None:
        """Write a checkpoint, or the adapter, with a probe; it is stable when this returns."""
        learner = self._config.learner
        if not learner.lora_rank:
            save_checkpoint(
                self.model, directory, version=version, tolerance=learner.probe_tolerance
            )
            return
        save_adapter(
            self.model, directory, name=learner.lora_name, version=version,
            tolerance=learner.probe_tolerance,
        )  # fmt: skip

    def state(self) -> dict[str, Any]:
        """Return the state besides the weights: the optimizer's and the random generator's."""
        reference = [] if self._reference is None else self._reference.state()
        return {
            "optimizer": self._optimizer.state(),
            "rng": torch.get_rng_state(),
            "reference": reference,
        }

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return what a step leaves behind, by kind and name: gradients, optimizer, weights.

        The next step changes these tensors in place.
        """
        trained = {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }
        gradients = {name: own.grad for name, own in trained.items() if own.grad is not None}
        moments = self._optimizer.tensors(list(trained))
        return {"gradients": gradients, "optimizer": moments, "weights": dict(trained)}

    def load_state(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state(state["optimizer"])
        torch.set_rng_state(state["rng"])
        if self._reference is not None:
            self._reference.load_state(state["reference"])


def own_plan(config: TrainConfig) -> NumericsPlan:
    """Prepare this process for the run's model and return its numerics plan.

    Raises BadRequest when there is no model, EngineFailure where bf16 would crash the process.
    """
    directory, learner = _model_directory(config), config.learner
    close = partial(numerics.plan, "close", device=learner.device, dtype=learner.dtype, rows=0)
    numerics.prepare_process(EngineOptions(device=learner.device, dtype=learner.dtype))
    try:
        plan = exact.own_plan(directory, device=learner.device, dtype=learner.dtype)
        products = ModelConfig.read(directory).products
    except CheckpointError as error:  # the embedded engine does not support the model
        return close(reason=error.message)
    rank = learner.lora_rank
    if plan.is_exact and rank and learner.device != "cpu":
        return close(reason="adapters on a GPU are not computed exactly")
    if plan.is_exact and rank and not row_multiple(products.with_lora(rank)):
        problem = f"matrix products of an adapter of rank {rank} depend on the batch size"
        numerics.warn_of_fallback(problem)
        return close(reason=problem)
    return plan


def _model_directory(config: TrainConfig) -> Path:
    return model_directory(config.model, "model")


def model_directory(name: str, field: str) -> Path:
    """Return the directory of a model. Raises BadRequest that names the field if there is none."""
    directory = bundled(name) or Path(name)
    if not directory.is_dir():
        raise BadRequest(
            f"{field} is {name!r}: expected a bundled name or a directory", param=field
        )
    return directory


def _is_moe(model: Any) -> bool:
    return bool(getattr(model.config.get_text_config(), "num_experts", 0))
