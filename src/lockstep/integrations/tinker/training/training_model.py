"""The model of one training client: accumulated gradients, AdamW steps and saved states."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from lockstep.engine.forward_pass import target_logprobs
from lockstep.engine.probe import write_probe
from lockstep.integrations.draws import DrawnRows
from lockstep.integrations.tinker.protocol.json_bodies import AdamParams
from lockstep.integrations.tinker.protocol.protobuf_messages import ForwardBackwardRequest
from lockstep.integrations.tinker.training.datums import (
    api_loss,
    batches,
    check_whole_distribution,
    read_datum,
)
from lockstep.integrations.tinker.training.lora_tensors import LoraModel, LoraSettings, LoraTensors
from lockstep.integrations.tinker.training.training_chain import TrainingChain
from lockstep.tokens.errors import BadRequest, CheckpointError, Conflict
from lockstep.train.records.tensor_digests import Digests, digest_tensors

OPTIMIZER = "optimizer.pt"


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """The logprobs of every target of every datum, and metrics."""

    logprobs: list[npt.NDArray[np.float32]]
    metrics: dict[str, float]


class TrainingModel:
    """The LoRA adapter of one training client under AdamW. Used from one thread."""

    def __init__(
        self,
        model: LoraModel,
        settings: LoraSettings,
        max_tokens: int,
        draws: DrawnRows | None = None,
    ) -> None:
        """`draws` has what was sampled. Raises BadRequest for settings that this model does not
        support."""
        self._model = model
        self._draws = DrawnRows() if draws is None else draws
        self.chain: TrainingChain | None = None
        """Records all calls, if it is set."""
        self._max_tokens = max_tokens
        self.tensors = LoraTensors(model, settings)
        self._optimizer = torch.optim.AdamW(self.tensors.parameters)
        self._failed: int | None = None
        self.steps = 0

    # Learning

    def forward_backward(self, request: ForwardBackwardRequest) -> ForwardResult:
        """Return logprobs and loss of a chunk; add its gradients unless it is forward only.

        Raises BadRequest for wrong data. Then no gradients of the chunk are added, and the next
        optimizer step fails (see `optim_step`).
        """
        parameters = self.tensors.parameters
        before = [None if own.grad is None else own.grad.clone() for own in parameters]
        try:
            result = self._forward_backward(request)
        except BaseException:
            for tensor, grad in zip(parameters, before, strict=True):
                tensor.grad = grad
            if not request.forward_only:
                self.reject(request.seq_id)
            raise
        if self.chain is not None and not request.forward_only:
            self.chain.call(request, result.logprobs, result.metrics["loss:sum"])
        return result

    def reject(self, seq_id: int) -> None:
        """Record that the gradients of this chunk are missing in the next step."""
        self._failed = seq_id

    def _forward_backward(self, request: ForwardBackwardRequest) -> ForwardResult:
        loss = api_loss(request.loss_fn)
        options = loss.with_defaults(request.loss_fn, request.config, field="loss_fn_config")
        if not request.data:
            raise BadRequest("data is empty: at least one datum is needed", param="data")
        vocab = self._model.model.config.get_text_config().vocab_size
        items = [
            read_datum(
                datum, loss, request.loss_fn, f"data[{at}]",
                max_tokens=self._max_tokens, vocab=vocab, device=self._model.device,
            )
            for at, datum in enumerate(request.data)
        ]  # fmt: skip
        if "old_logprobs" in loss.inputs:
            for at, item in enumerate(items):
                check_whole_distribution(item, self._draws, f"data[{at}]")
        logprobs: list[npt.NDArray[np.float32]] = []
        total = 0.0
        learns = not request.forward_only
        multiple = self._model.row_multiple(self.tensors.settings.rank)
        with self._model.applying(self.tensors) as model, torch.set_grad_enabled(learns):
            for batch in batches(items):
                scored = target_logprobs(
                    model,
                    [item.tokens for item in batch],
                    [item.targets for item in batch],
                    multiple=multiple,
                )
                # The API documents sums over all tokens and datums, never means.
                losses = [
                    loss(item.loss_inputs(own), options).values.sum()
                    for own, item in zip(scored, batch, strict=True)
                ]
                batch_loss = torch.stack(losses).sum()
                if not bool(torch.isfinite(batch_loss)):
                    raise BadRequest(f"the loss is {batch_loss.item()}: are the inputs finite?")
                if learns and batch_loss.requires_grad:
                    batch_loss.backward()
                total += float(batch_loss.detach())
                logprobs += [own.detach().cpu().float().numpy() for own in scored]
        return ForwardResult(logprobs, {"loss:sum": total})

    def optim_step(self, params: AdamParams) -> dict[str, float]:
        """Apply the accumulated gradients, clear them, and return metrics.

        Raises BadRequest for parameters out of range, and Conflict when a chunk since the last step
        failed. Then the gradients are cleared: a step never uses part of a call.
        """
        params.check()
        failed, self._failed = self._failed, None
        if failed is not None:
            self._clear()
            raise Conflict(
                f"the forward_backward of seq_id {failed} failed, so its gradients are missing: "
                "all gradients were cleared and none applied; send the calls of this step again"
            )
        parameters = self.tensors.parameters
        for group in self._optimizer.param_groups:
            group["lr"] = params.learning_rate
            group["betas"] = (params.beta1, params.beta2)
            group["eps"] = params.eps
            group["weight_decay"] = params.weight_decay
        limit = params.grad_clip_norm or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, limit))
        if not math.isfinite(norm):
            self._clear()
            raise Conflict(f"the gradient norm is {norm}: the weights are unchanged")
        self._optimizer.step()
        if self.chain is not None:
            self.chain.step(params, norm, self._digests())
        self._optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return {"grad_norm": norm}

    def _clear(self) -> None:
        """Clear the gradients of calls that no step will use."""
        self._optimizer.zero_grad(set_to_none=True)
        if self.chain is not None:
            self.chain.dropped()

    def _digests(self) -> Digests:
        """Return digests of the gradients of this step, and of what it left behind."""
        named = list(zip(self.tensors.names, self.tensors.parameters, strict=True))
        moments = {
            f"{name}.{key}": own
            for name, tensor in named
            for key, own in self._optimizer.state.get(tensor, {}).items()
        }
        gradients = {name: tensor.grad for name, tensor in named if tensor.grad is not None}
        return {
            "gradients": digest_tensors(gradients),
            "optimizer": digest_tensors(moments),
            "weights": digest_tensors(dict(named)),
        }

    # Checkpoints

    def save_for_sampler(self, directory: Path, name: str) -> None:
        """Write the adapter, and the probe that workers must reproduce."""
        self.tensors.save(directory)
        is_exact = self._model.is_exact_at(self.tensors.settings.rank)
        with self._model.applying(self.tensors) as model:
            tolerance = 0.0 if is_exact else self._model.close_tolerance
            write_probe(model, directory, adapter=name, tolerance=tolerance)

    def save(self, directory: Path) -> None:
        """Write the adapter and the state of the optimizer."""
        self.tensors.save(directory)
        torch.save(self._optimizer.state_dict(), directory / OPTIMIZER)

    def load(self, directory: Path, *, optimizer: bool, steps: int = 0) -> None:
        """Load the state saved in `directory` after `steps` steps, and clear the gradients.

        Without `optimizer` the moments of AdamW start at zero. Raises CheckpointError unless
        everything fits.
        """
        state = None
        if optimizer:
            try:
                state = torch.load(directory / OPTIMIZER, weights_only=True)
            except FileNotFoundError:
                raise CheckpointError(
                    "this checkpoint has no optimizer state: it was saved for a sampler"
                ) from None
        self.tensors.load(directory)
        self._optimizer = torch.optim.AdamW(self.tensors.parameters)
        if state is not None:
            self._optimizer.load_state_dict(state)
        self._optimizer.zero_grad(set_to_none=True)
        self._failed = None
        self.steps = steps
        if self.chain is not None:
            self.chain.loaded(directory)
