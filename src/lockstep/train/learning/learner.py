"""The learner: an optimizer step over a batch, checkpoints, and the state for resuming.

In exact mode its logprobs equal those of an engine with the same weights, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.engine import exact
from lockstep.engine.config import ModelConfig
from lockstep.engine.forward_pass import Ints
from lockstep.engine.numerics import plan as numerics
from lockstep.engine.numerics.bf16 import make_bf16_safe
from lockstep.engine.numerics.block_shapes import row_multiple
from lockstep.engine.options import EngineOptions
from lockstep.engine.probe import remember, save_adapter, save_checkpoint
from lockstep.engine.text.grammars import Grammars
from lockstep.models import bundled
from lockstep.tokens.errors import BadRequest, CheckpointError, Conflict
from lockstep.tokens.numerics import NumericsPlan
from lockstep.train.config import TrainConfig
from lockstep.train.learning.batch import TrainBatch, TrainItem
from lockstep.train.learning.expert_replay import ExpertReplay
from lockstep.train.learning.item_logprobs import ItemLogprobs, sampled_at
from lockstep.train.learning.tally import Tally
from lockstep.train.learning.teacher import reverse_kl, teacher_advantages
from lockstep.train.losses.ratio import Ratio


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The result of a step: metrics, and the trainer's logprobs of each item's tokens."""

    metrics: dict[str, float]
    logprobs: list[list[float]]


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
        self._loss, self._loss_options = config.loss.load()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            trained, lr=learner.lr, betas=learner.betas, weight_decay=learner.weight_decay
        )
        self._trained = trained
        replay = ExpertReplay(self.model) if _is_moe(self.model) else None
        directory = _model_directory(config)
        vocab = self.model.config.get_text_config().vocab_size
        self._scorer = ItemLogprobs(self.model, config, Grammars.of(directory, vocab), replay)
        # The fleet serves these weights before the first step. Their logprobs in the first probe
        # tell new weights from old, and show how closely each worker follows.
        remember(self.model)

    def _load(self, weights: Path | None) -> Any:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()  # a bar per saved step would hide the run's own output
        learner = self._config.learner
        base = _model_directory(self._config)
        if weights is not None and not learner.lora_rank:
            base = weights
        model = AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, learner.dtype))
        model = model.to(learner.device).train()
        if learner.lora_rank:
            model = self._with_adapter(model, weights)
        return exact.prepare(model) if self.exact else model

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
        total = batch.learnt_tokens
        if not total:
            raise Conflict(
                f"step {number} has no token to learn from: {batch.dropped} samples were dropped "
                f"({batch.aborts} aborts, {batch.mixed} of mixed versions)"
            )
        lr = self._rate(number)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.zero_grad(set_to_none=True)
        tally, loss_sum = Tally(), 0.0
        logprobs = [[0.0] * len(item.sample.token_ids) for item in batch.items]
        for indices in self._scorer.passes(batch.items):
            items = [batch.items[at] for at in indices]
            positions = [sampled_at(item) for item in items]
            loss, trainer_N = self._learn(items, positions, tally)
            (loss / total).backward()
            loss_sum += float(loss.detach())
            values = iter(trainer_N.tolist())
            for at, tokens in zip(indices, positions, strict=True):
                for token in tokens:
                    logprobs[at][token] = next(values)
        norm = torch.nn.utils.clip_grad_norm_(self._trained, self._config.learner.max_grad_norm)
        if not bool(torch.isfinite(norm)):
            raise Conflict(
                f"the gradient norm of step {number} is {float(norm)}: the weights are unchanged"
            )
        self._optimizer.step()
        metrics = {**tally.means(), "loss": loss_sum / total, "grad_norm": float(norm), "lr": lr}
        return StepOutcome(metrics, logprobs)

    def _learn(
        self, items: list[TrainItem], positions: list[Ints], tally: Tally
    ) -> tuple[Tensor, Tensor]:
        """Return the summed loss of some items, and the trainer's logprobs of their sampled tokens.

        `positions[i]` are those of the sampled tokens of item i.
        """
        device = self.model.device

        def flatten(rows: Iterable[Any], dtype: Any) -> Tensor:
            parts = [np.asarray(row, dtype)[at] for row, at in zip(rows, positions, strict=True)]
            return torch.from_numpy(np.concatenate(parts)).to(device)

        engine_N = flatten((item.sample.logprobs for item in items), np.float32)
        learn_N = flatten((item.learn_T for item in items), np.bool_)
        trainer_N, entropy_N = self._scorer.score(items, positions)
        # A token that these weights could not draw under its options has no ratio to learn from.
        drawable_N = trainer_N > -torch.inf
        learn_N = learn_N & drawable_N
        trainer_N = torch.where(drawable_N, trainer_N, engine_N)
        metrics_N = {"entropy": entropy_N}
        lengths = [len(at) for at in positions]
        if self._loss.learns_from == "teacher":
            teacher_N = flatten((item.teacher or [] for item in items), np.float32)
            advantages_N = teacher_advantages(trainer_N, teacher_N)
            metrics_N["ref_kl"] = reverse_kl(trainer_N, teacher_N)
        else:
            advantages = torch.tensor([item.advantage for item in items])
            advantages_N = advantages.repeat_interleave(torch.tensor(lengths)).to(device)
        token_loss = self._loss(
            {
                "logprobs": trainer_N,
                "old_logprobs": engine_N,
                "advantages": advantages_N,
                "token_mask": learn_N,
                "weights": torch.ones_like(engine_N),
                "sequence_ratio_mask": learn_N.to(engine_N.dtype),
                "lengths": lengths,
            },
            self._loss_options,
        )
        ratio = Ratio.of(trainer_N.detach(), engine_N)
        tally.add(ratio, advantages_N, learn_N, {**metrics_N, **token_loss.metrics})
        # Not every loss takes the mask. `where` and not a product: 0 times infinity is NaN.
        values_N = torch.where(learn_N, token_loss.values, torch.zeros_like(token_loss.values))
        return values_N.sum(), trainer_N.detach()

    def _rate(self, number: int) -> float:
        learner = self._config.learner
        return learner.lr * min(1.0, number / max(learner.warmup_steps, 1))

    def base_logprobs(self, token_ids: list[int]) -> list[float]:
        """Return the logprobs of the tokens after the first, without the adapter."""
        with torch.no_grad(), self.model.disable_adapter():
            (row,) = exact.token_logprobs(self.model, [token_ids])
        logprobs: list[float] = row.tolist()
        return logprobs

    # Checkpoints and state

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
        return {"optimizer": self._optimizer.state_dict(), "rng": torch.get_rng_state()}

    def load_state(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])


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
    directory = bundled(config.model) or Path(config.model)
    if not directory.is_dir():
        raise BadRequest(
            f"model is {config.model!r}: expected a bundled name or a directory", param="model"
        )
    return directory


def _is_moe(model: Any) -> bool:
    return bool(getattr(model.config.get_text_config(), "num_experts", 0))
