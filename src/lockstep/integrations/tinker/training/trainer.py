"""One training client's model: gradients that add up, AdamW steps, and states that can be saved."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from lockstep.engine.probe import write_probe
from lockstep.integrations.tinker.protocol.messages import Datum, ForwardBackwardRequest
from lockstep.integrations.tinker.protocol.types import AdamParams
from lockstep.integrations.tinker.training.lora import LoraModel, LoraSettings, LoraTensors
from lockstep.integrations.tinker.training.losses import Loss, loss_of
from lockstep.integrations.tinker.training.passes import TrainingSequence, batches, target_logprobs
from lockstep.tokens.errors import BadRequest, CheckpointError, Conflict

OPTIMIZER = "optimizer.pt"


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """The logprobs of every target of every datum, and the sum of the loss."""

    logprobs: list[npt.NDArray[np.float32]]
    metrics: dict[str, float]


class TrainingModel:
    """The LoRA of one training client under AdamW. Its methods run one at a time, in one thread."""

    def __init__(self, model: LoraModel, settings: LoraSettings, max_tokens: int) -> None:
        """Raises BadRequest for settings that this model cannot have."""
        self._model = model
        self._max_tokens = max_tokens
        self.tensors = LoraTensors(model, settings)
        self._optimizer = torch.optim.AdamW(self.tensors.parameters)
        self._failed: int | None = None
        self.steps = 0

    # Learning

    def forward_backward(self, request: ForwardBackwardRequest) -> ForwardResult:
        """Logprobs and loss of a chunk; unless it is forward only, its gradients are added.

        Raises BadRequest for data that makes no sense. Then nothing of the chunk is added, and
        the step that would have used it is refused (see `optim_step`).
        """
        before = [
            None if each.grad is None else each.grad.clone() for each in self.tensors.parameters
        ]
        try:
            return self._forward_backward(request)
        except BaseException:
            for tensor, grad in zip(self.tensors.parameters, before, strict=True):
                tensor.grad = grad
            if not request.forward_only:
                self.refuse(request.seq_id)
            raise

    def refuse(self, seq_id: int) -> None:
        """Remembers that this chunk added nothing, for the step that counts on it."""
        self._failed = seq_id

    def _forward_backward(self, request: ForwardBackwardRequest) -> ForwardResult:
        loss = loss_of(request.loss_fn)
        config = loss.settings(request.loss_fn, request.config)
        if not request.data:
            raise BadRequest("data is empty: at least one datum is needed", param="data")
        items = [
            self._item(datum, loss, request.loss_fn, f"data[{at}]")
            for at, datum in enumerate(request.data)
        ]
        logprobs: list[npt.NDArray[np.float32]] = []
        total = 0.0
        learns = not request.forward_only
        multiple = self._model.row_multiple(self.tensors.settings.rank)
        with self._model.applying(self.tensors) as model, torch.set_grad_enabled(learns):
            for batch in batches(items):
                chosen = target_logprobs(model, batch, multiple)
                losses = [
                    loss.compute(own, item.inputs, config)
                    for own, item in zip(chosen, batch, strict=True)
                ]
                summed = torch.stack(losses).sum()
                if not bool(torch.isfinite(summed)):
                    raise BadRequest(f"the loss is {summed.item()}: are the inputs finite?")
                if learns and summed.requires_grad:
                    summed.backward()
                total += float(summed.detach())
                logprobs += [own.detach().cpu().float().numpy() for own in chosen]
        return ForwardResult(logprobs, {"loss:sum": total})

    def _item(self, datum: Datum, loss: Loss, name: str, field: str) -> TrainingSequence:
        """Raises BadRequest that names what does not fit."""
        tokens = list(datum.tokens)
        if not 1 <= len(tokens) <= self._max_tokens:
            raise BadRequest(
                f"{field}.model_input has {len(tokens)} tokens: expected 1 to {self._max_tokens}",
                param=f"{field}.model_input",
            )
        if sorted(datum.inputs) != sorted(loss.inputs):
            raise BadRequest(
                f"{field}.loss_fn_inputs are {', '.join(datum.inputs) or 'none'}: {name} takes "
                f"{', '.join(loss.inputs)}",
                param=f"{field}.loss_fn_inputs",
            )
        arrays = {
            key: tensor.array(f"{field}.loss_fn_inputs.{key}")
            for key, tensor in datum.inputs.items()
        }
        targets = arrays.pop("target_tokens")
        deep = targets.ndim == 2 and name == "cross_entropy"
        if len(targets) != len(tokens) or (targets.ndim != 1 and not deep):
            raise BadRequest(
                f"{field}.loss_fn_inputs.target_tokens has shape {targets.shape} for "
                f"{len(tokens)} tokens",
                param=f"{field}.loss_fn_inputs.target_tokens",
            )
        for key, array in arrays.items():
            if array.shape != targets.shape or not bool(np.isfinite(array).all()):
                raise BadRequest(
                    f"{field}.loss_fn_inputs.{key} has shape {array.shape}: expected "
                    f"{targets.shape}, and only finite numbers",
                    param=f"{field}.loss_fn_inputs.{key}",
                )
        vocab = self._model.model.config.get_text_config().vocab_size
        ids = np.concatenate((np.asarray(tokens), targets.reshape(-1)))
        if targets.dtype != np.int64 or not bool(((ids >= 0) & (ids < vocab)).all()):
            raise BadRequest(
                f"{field} has token ids that are not integers from 0 to {vocab - 1}", param=field
            )
        device = self._model.device
        inputs = {
            key: torch.from_numpy(array.astype(np.float32)).to(device)
            for key, array in arrays.items()
        }
        return TrainingSequence(
            tokens, torch.from_numpy(targets.astype(np.int64)).to(device), inputs
        )

    def optim_step(self, params: AdamParams) -> dict[str, float]:
        """Applies the gradients that have added up, and clears them; returns metrics.

        Raises BadRequest for numbers that make no sense, and Conflict when a chunk since the last
        step was refused: the gradients are cleared then, and nothing is learnt from part of a call.
        """
        params.check()
        failed, self._failed = self._failed, None
        if failed is not None:
            self._optimizer.zero_grad(set_to_none=True)
            raise Conflict(
                f"the forward_backward of seq_id {failed} had failed, so its gradients are "
                "missing: none were applied, all are cleared; send the calls of this step again"
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
            self._optimizer.zero_grad(set_to_none=True)
            raise Conflict(f"the gradient norm is {norm}: nothing was learnt")
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return {"grad_norm": norm}

    # What survives

    def save_for_sampler(self, directory: Path, name: str) -> None:
        """Writes the adapter, and the logprobs that whoever serves it must reproduce."""
        self.tensors.save(directory)
        is_exact = self._model.is_exact_at(self.tensors.settings.rank)
        with self._model.applying(self.tensors) as model:
            tolerance = 0.0 if is_exact else self._model.close_tolerance
            write_probe(model, directory, adapter=name, tolerance=tolerance)

    def save(self, directory: Path) -> None:
        """Writes the adapter and the state of the optimizer."""
        self.tensors.save(directory)
        torch.save(self._optimizer.state_dict(), directory / OPTIMIZER)

    def load(self, directory: Path, *, optimizer: bool, steps: int = 0) -> None:
        """Goes on from what was saved there after so many steps; gradients are cleared.

        Without `optimizer` the moments start anew. Raises CheckpointError unless all of it fits.
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
