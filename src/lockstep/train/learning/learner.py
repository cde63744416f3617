"""The model that learns: an optimizer step over a batch, checkpoints, and its state for resuming.

Where the engine computes exactly, so does this: forward passes are padded as the engine pads them,
and the logprobs of equal weights are equal bit for bit.
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
from lockstep.engine.config import EngineOptions, ModelConfig
from lockstep.engine.numerics import plan as numerics
from lockstep.engine.numerics.bf16 import make_bf16_safe
from lockstep.engine.numerics.block_shapes import row_multiple
from lockstep.engine.probe import remember, save_adapter, save_checkpoint
from lockstep.engine.text.grammars import Grammars
from lockstep.models import bundled
from lockstep.tokens.errors import BadRequest, CheckpointError, Conflict
from lockstep.tokens.numerics import NumericsPlan
from lockstep.train.config import TrainConfig
from lockstep.train.learning.batch import TrainBatch, TrainItem
from lockstep.train.learning.distill import distill_loss, reverse_kl
from lockstep.train.learning.expert_replay import ExpertReplay
from lockstep.train.learning.forward import ForwardPass, Ints, sampled_at
from lockstep.train.learning.loss import Ratio, Tally, masks, policy_loss


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step did; `logprobs` are the trainer's own, of the items in their order."""

    metrics: dict[str, float]
    logprobs: list[list[float]]


class Learner:
    """A transformers causal LM under AdamW, trained whole or through LoRA.

    `weights` is the directory to start from: by default the config's model, after a crash the
    checkpoint. `exact` has it compute as the engine does. Raises BadRequest when there is no model.
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
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            trained, lr=learner.lr, betas=learner.betas, weight_decay=learner.weight_decay
        )
        self._trained = trained
        replay = ExpertReplay(self.model) if _is_moe(self.model) else None
        directory = _model_directory(config)
        vocab = self.model.config.get_text_config().vocab_size
        self._forward = ForwardPass(self.model, config, Grammars.of(directory, vocab), replay)
        # The fleet serves these weights before the first step: with their logprobs in the first
        # probe it measures how closely each worker follows, and tells new weights from old.
        remember(self.model)

    def _load(self, weights: Path | None) -> Any:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()  # one bar per saved step would bury the run's own
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
        # Workers have an adapter in the type of the model, and so must the trainer.
        return get_peft_model(model, adapter, autocast_adapter_dtype=False)

    # One step

    def step(self, batch: TrainBatch, number: int) -> StepOutcome:
        """Learns from the batch. Raises Conflict when there is no token to learn from."""
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
        for chosen in self._forward.passes(batch.items):
            items = [batch.items[at] for at in chosen]
            tokens = [sampled_at(item) for item in items]
            loss, trainer_N = self._learn(items, tokens, tally)
            (loss / total).backward()
            loss_sum += float(loss.detach())
            values = iter(trainer_N.tolist())
            for at, drawn in zip(chosen, tokens, strict=True):
                for token in drawn:
                    logprobs[at][token] = next(values)
        norm = torch.nn.utils.clip_grad_norm_(self._trained, self._config.learner.max_grad_norm)
        if not bool(torch.isfinite(norm)):
            raise Conflict(f"the gradient of step {number} is {float(norm)}: nothing was learnt")
        self._optimizer.step()
        metrics = {**tally.means(), "loss": loss_sum / total, "grad_norm": float(norm), "lr": lr}
        return StepOutcome(metrics, logprobs)

    def _learn(
        self, items: list[TrainItem], tokens: list[Ints], tally: Tally
    ) -> tuple[Tensor, Tensor]:
        """The summed loss of some items, and the trainer's logprobs of their sampled tokens."""
        device = self.model.device

        def flat(rows: Iterable[Any], dtype: Any) -> Tensor:
            parts = [np.asarray(row, dtype)[at] for row, at in zip(rows, tokens, strict=True)]
            return torch.from_numpy(np.concatenate(parts)).to(device)

        engine_N = flat((item.sample.logprobs for item in items), np.float32)
        learn_N = flat((item.learn_T for item in items), np.bool_)
        trainer_N, entropy_N = self._forward.logprobs(items, tokens)
        # A token that these weights would not draw under its options has no ratio to learn from.
        drawable_N = trainer_N > -torch.inf
        learn_N = learn_N & drawable_N
        trainer_N = torch.where(drawable_N, trainer_N, engine_N)
        ratio = Ratio.of(trainer_N, engine_N)
        config = self._config.loss
        more = {"entropy": entropy_N}
        if config.kind == "distill":
            teacher_N = flat((item.teacher or [] for item in items), np.float32)
            loss, masked, advantage_N = distill_loss(ratio, trainer_N, teacher_N, learn_N, config)
            more["ref_kl"] = reverse_kl(trainer_N, teacher_N)
        else:
            counts = torch.tensor([len(at) for at in tokens])
            each = torch.tensor([item.advantage for item in items])
            advantage_N = each.repeat_interleave(counts).to(device)
            masked = masks(ratio, advantage_N, config)
            loss = policy_loss(ratio, masked, advantage_N, learn_N, config)
        tally.add(ratio, masked, advantage_N, learn_N, **more)
        return loss, trainer_N.detach()

    def _rate(self, number: int) -> float:
        learner = self._config.learner
        return learner.lr * min(1.0, number / max(learner.warmup_steps, 1))

    def base_logprobs(self, token_ids: list[int]) -> list[float]:
        """The logprobs that the model without its adapter gives the tokens after the first."""
        with torch.no_grad(), self.model.disable_adapter():
            (row,) = exact.token_logprobs(self.model, [token_ids])
        logprobs: list[float] = row.tolist()
        return logprobs

    # What survives

    def save(self, directory: Path, version: str) -> None:
        """A checkpoint with a probe, or the adapter with one; stable when this returns."""
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
        """What the weights do not hold: the optimizer and the random state."""
        return {"optimizer": self._optimizer.state_dict(), "rng": torch.get_rng_state()}

    def load_state(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])


def own_plan(config: TrainConfig) -> NumericsPlan:
    """How this process computes with the run's model; the process is prepared for it first.

    Raises BadRequest when there is no model, EngineFailure where bf16 ends this process.
    """
    directory, learner = _model_directory(config), config.learner
    close = partial(numerics.plan, "close", device=learner.device, dtype=learner.dtype, rows=0)
    numerics.prepare_process(EngineOptions(device=learner.device, dtype=learner.dtype))
    try:
        plan = exact.own_plan(directory, device=learner.device, dtype=learner.dtype)
        products = ModelConfig.read(directory).products
    except CheckpointError as error:  # a model that the embedded engine does not have
        return close(reason=error.message)
    rank = learner.lora_rank
    if plan.is_exact and rank and learner.device != "cpu":
        return close(reason="a GPU computes adapters closely, not exactly")
    if plan.is_exact and rank and not row_multiple(products.with_lora(rank)):
        return close(reason=f"the products of an adapter of rank {rank} depend on the batch")
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
