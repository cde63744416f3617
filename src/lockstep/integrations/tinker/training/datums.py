"""Datums of a forward_backward call: checked against the loss, and grouped into forward passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.integrations.draws import DrawnRows
from lockstep.integrations.tinker.protocol.protobuf_messages import Datum
from lockstep.tokens.errors import BadRequest
from lockstep.train.losses.loss import Loss
from lockstep.train.losses.loss_table import LOSSES

PASS_TOKENS = 16384
"""Maximum number of tokens in a forward pass, with padding. A longer sequence gets its own pass."""
PASS_DATUMS = 64
"""Maximum number of datums in a forward pass. It divides the 1024 datums of an SDK chunk: a call in
several chunks adds up the same gradients in the same order as in one."""
API_INPUTS = {
    "old_logprobs": "logprobs",
    "advantages": "advantages",
    "weights": "weights",
    "sequence_ratio_mask": "sequence_ratio_mask",
}
"""The inputs of losses that a datum carries, with their names in the API."""
UNSUPPORTED = {
    "stable_reinforce": "it needs sampler records that this server does not keep",
    "custom": "it needs an uploaded graph; forward_backward_custom of the SDK works without one",
}


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One checked datum: tokens, targets (N,) or (N, K), and the inputs of the loss by name."""

    tokens: list[int]
    targets: Tensor
    inputs: dict[str, Tensor]

    def loss_inputs(self, logprobs: Tensor) -> Mapping[str, Any]:
        """Return what a loss takes. Tokens without an advantage or a weight do not count."""
        signal = self.inputs["advantages" if "advantages" in self.inputs else "weights"]
        return {
            **self.inputs,
            "logprobs": logprobs,
            "token_mask": signal != 0,
            "lengths": [len(self.tokens)],
        }


def api_losses() -> dict[str, Loss]:
    """The losses of the table that the API offers: all whose inputs a datum can carry."""
    return {name: loss for name, loss in LOSSES.items() if loss.learns_from == "rewards"}


def api_loss(name: str) -> Loss:
    """Return the loss of that name. Raises BadRequest that lists the losses there are."""
    losses = api_losses()
    if name in losses:
        return losses[name]
    reason = UNSUPPORTED.get(name, f"expected one of {', '.join(losses)}")
    raise BadRequest(f"loss_fn {name!r} is not supported: {reason}", param="loss_fn")


def read_datum(
    datum: Datum,
    loss: Loss,
    name: str,
    field: str,
    *,
    max_tokens: int,
    vocab: int,
    device: torch.device,
) -> TrainingSequence:
    """Return the checked datum for the loss `name`. Raises BadRequest that names what is wrong.

    `field` is the place of the datum in the request, such as data[3].
    """
    tokens = list(datum.tokens)
    if not 1 <= len(tokens) <= max_tokens:
        raise BadRequest(
            f"{field}.model_input has {len(tokens)} tokens: expected 1 to {max_tokens}",
            param=f"{field}.model_input",
        )
    expected = {"target_tokens", *(API_INPUTS[key] for key in loss.inputs if key in API_INPUTS)}
    if set(datum.inputs) != expected:
        raise BadRequest(
            f"{field}.loss_fn_inputs are {', '.join(datum.inputs) or 'none'}: {name} takes "
            f"{', '.join(sorted(expected))}",
            param=f"{field}.loss_fn_inputs",
        )
    arrays = {
        key: tensor.array(f"{field}.loss_fn_inputs.{key}") for key, tensor in datum.inputs.items()
    }
    targets = arrays.pop("target_tokens")
    # Several targets per token make sense only where no sampled token is compared.
    most_axes = 1 if "old_logprobs" in loss.inputs else 2
    if len(targets) != len(tokens) or not 1 <= targets.ndim <= most_axes:
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
    ids = np.concatenate((np.asarray(tokens), targets.reshape(-1)))
    if targets.dtype != np.int64 or not bool(((ids >= 0) & (ids < vocab)).all()):
        raise BadRequest(
            f"{field} has token ids that are not integers from 0 to {vocab - 1}", param=field
        )
    return TrainingSequence(
        tokens,
        torch.from_numpy(targets.astype(np.int64)).to(device),
        {
            key: torch.from_numpy(arrays[own].astype(np.float32)).to(device)
            for key, own in API_INPUTS.items()
            if own in arrays
        },
    )


def check_whole_distribution(item: TrainingSequence, draws: DrawnRows, field: str) -> None:
    """Raise BadRequest if tokens that are learnt from were drawn from a part of the vocabulary.

    The API's logprobs are those of the whole vocabulary, for the sampler and for the trainer, so
    that no ratio of them is that of such tokens.
    """
    if not draws:
        return
    learnt = (item.inputs["advantages"] != 0).cpu()
    for draw in draws.find([*item.tokens, int(item.targets[-1])]):
        span = draw.span
        if span.shaping.restricts and bool(learnt[max(span.start - 1, 0) : span.end - 1].any()):
            raise BadRequest(
                f"{field} has tokens that were drawn with {span.shaping.changes}, but its logprobs "
                "are those of the whole vocabulary, so that every ratio would be biased: sample "
                "what you learn from with top_p 1 and top_k -1",
                param=field,
            )


def batches(items: Sequence[TrainingSequence]) -> list[list[TrainingSequence]]:
    """Return the items in their order, grouped into forward passes."""
    batches: list[list[TrainingSequence]] = [[]]
    for at, item in enumerate(items):
        longest = max([len(item.tokens), *(len(other.tokens) for other in batches[-1])])
        full = longest * (len(batches[-1]) + 1) > PASS_TOKENS or at % PASS_DATUMS == 0
        if batches[-1] and full:
            batches.append([])
        batches[-1].append(item)
    return batches
