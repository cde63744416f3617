"""A trainer's logprobs of samples, processed as the engine processed them during sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.engine.exact import row_multiple_of
from lockstep.engine.model.arithmetic import round_up
from lockstep.engine.processing import process_spans
from lockstep.engine.text.grammars import Grammars
from lockstep.tokens import Sample


def sample_logprobs(
    model: Any, samples: Sequence[Sample], grammars: Grammars | None = None
) -> list[Tensor]:
    """Return the logprob of each token after the first of each sample, in the sample's mode.

    For sampled tokens these equal the engine's logprobs, bit for bit when `model` is prepared
    (`lockstep.engine.exact`), at any temperature and with any option that shaped the distribution.
    A token that cannot be drawn under these weights gets -inf. The result is differentiable.
    `grammars` (`Grammars.of` the model's directory) are required for samples constrained by a
    grammar; without them BadRequest is raised.
    """
    return [_logprobs(model, sample, grammars) for sample in samples]


def _logprobs(model: Any, sample: Sample, grammars: Grammars | None) -> Tensor:
    length = len(sample.token_ids)
    width = round_up(length, row_multiple_of(model))
    ids = torch.tensor([sample.token_ids + [0] * (width - length)], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits.float()[0, : length - 1]
    if sample.logprob_mode == "processed":
        logits = process_spans(
            logits, sample.token_ids, sample.shaping, sample.temperature, grammars=grammars
        )
    logprobs = torch.log_softmax(logits, dim=-1)
    return logprobs.gather(-1, ids[0, 1:length, None]).squeeze(-1)
