"""The trainer's forward pass: logprobs of the tokens that were sampled, given those before them.

Only sampled tokens get logits. Where the model computes exactly on a CPU, samples are packed into
one row without padding, and a prompt that several samples begin with is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.engine import exact
from lockstep.engine.model.arithmetic import round_up
from lockstep.engine.numerics.packing import pack
from lockstep.engine.processing import process_spans
from lockstep.engine.text.grammars import Grammars
from lockstep.train.config import TrainConfig
from lockstep.train.learning.batch import TrainItem
from lockstep.train.learning.expert_replay import ExpertReplay

PASS_TOKENS = 4096
"""A pass of few tokens takes more samples than `learner.micro_batch`, up to this many tokens."""
Ints = npt.NDArray[np.int64]


class ForwardPass:
    """Runs a model over items. Values come flat, over the sampled tokens of one item after another
    (`sampled_at` says which those are): names end in N for that axis."""

    def __init__(
        self,
        model: Any,
        config: TrainConfig,
        grammars: Grammars | None,
        replay: ExpertReplay | None,
    ) -> None:
        self._model = model
        self._config = config
        self._grammars = grammars
        self._replay = replay if config.learner.replay_experts else None
        self._packs = exact.packs(model)

    def passes(self, items: Sequence[TrainItem]) -> list[list[int]]:
        """The indices of the items of each pass."""
        order = list(range(len(items)))
        if not self._packs:  # by length, so that a pass has little padding
            order.sort(key=lambda at: len(items[at].sample.token_ids))
        passes: list[list[int]] = []
        tokens = 0
        for at in order:
            length = len(items[at].sample.token_ids)
            full = passes and len(passes[-1]) >= self._config.learner.micro_batch
            if not passes or (full and tokens + length > PASS_TOKENS):
                passes.append([])
                tokens = 0
            passes[-1].append(at)
            tokens += length
        return passes

    def logprobs(self, items: Sequence[TrainItem], drawn: Sequence[Ints]) -> tuple[Tensor, Tensor]:
        """Logprobs of the sampled tokens, and the entropy where they were drawn.

        `drawn` has `sampled_at` of each item.
        """
        own_NV, ids_N = (self._packed if self._packs else self._padded)(items, drawn)
        processed = self._config.rollout.logprobs == "processed"
        shaped = any(item.sample.shaping for item in items)
        temperature = self._config.rollout.temperature if processed else 1.0
        logits_NV = own_NV.float()
        if processed and shaped:
            logits_NV = self._shaped(logits_NV, items, drawn)
        elif temperature != 1.0:
            logits_NV = logits_NV / temperature
        logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
        if own_NV.is_cuda and not shaped:
            chosen_N = exact.chosen_logprobs(own_NV, ids_N, temperature)
        else:
            chosen_N = logprobs_NV.gather(-1, ids_N[:, None]).squeeze(-1)
        with torch.no_grad():
            seen_NV = logprobs_NV.masked_fill(logprobs_NV == -torch.inf, 0.0)
            entropy_N = -(logprobs_NV.exp() * seen_NV).sum(-1)
        return chosen_N, entropy_N

    def _packed(self, items: Sequence[TrainItem], drawn: Sequence[Ints]) -> tuple[Tensor, Tensor]:
        """The logits of the sampled tokens and their ids, from one row."""
        sequences = [item.sample.token_ids for item in items]
        if self._replay is None:
            shared = [int(at[0]) if len(at) else 0 for at in drawn]
            row = pack(sequences, shared, multiple=exact.row_multiple_of(self._model))
        else:
            # The experts that an older version chose for a prompt may be others: each has its own,
            # and there are none for tokens that nobody sampled.
            row = pack(sequences)
        pairs = list(zip(row.tokens_of, drawn, strict=True))
        before_N, at_N = (
            torch.from_numpy(np.concatenate([tokens[at - back] for tokens, at in pairs]))
            for back in (1, 0)
        )
        with self._experts(items, None):
            logits = self._model(**row.arguments(), logits_to_keep=before_N).logits
        return logits[0], row.ids_T[at_N]

    def _padded(self, items: Sequence[TrainItem], drawn: Sequence[Ints]) -> tuple[Tensor, Tensor]:
        """The logits of the sampled tokens and their ids, from a row for each item."""
        device = self._model.device
        longest = max(len(item.sample.token_ids) for item in items)
        width = round_up(longest, exact.row_multiple_of(self._model))
        rows = np.zeros((len(items), width), dtype=np.int64)
        for at, item in enumerate(items):
            rows[at, : len(item.sample.token_ids)] = item.sample.token_ids
        ids_BT = torch.from_numpy(rows).to(device)
        with self._experts(items, width):
            logits_BTV = self._model(input_ids=ids_BT, use_cache=False).logits
        flat = [row * width + at for row, at in enumerate(drawn)]
        at_N = torch.from_numpy(np.concatenate(flat)).to(device)
        return logits_BTV.flatten(0, 1)[at_N - 1], ids_BT.flatten()[at_N]

    def _experts(
        self, items: Sequence[TrainItem], width: int | None
    ) -> AbstractContextManager[None]:
        """Replays the experts of the items, which are padded to `width`, or packed."""
        if self._replay is None:
            return nullcontext()
        samples = [item.sample for item in items]
        return self._replay.of(samples, width, self._model.device)

    def _shaped(
        self, logits_NV: Tensor, items: Sequence[TrainItem], drawn: Sequence[Ints]
    ) -> Tensor:
        """The logits as they were when the tokens were drawn: tempered, truncated, penalized."""
        temperature = self._config.rollout.temperature
        parts = logits_NV.split([len(at) for at in drawn])
        rows = []
        for own_V, item, tokens in zip(parts, items, drawn, strict=True):
            ids, spans = item.sample.token_ids, item.sample.shaping
            at = torch.from_numpy(tokens - 1).to(own_V.device)
            whole_TV = own_V.new_zeros(len(ids) - 1, own_V.shape[-1]).index_copy(0, at, own_V)
            processed_TV = process_spans(whole_TV, ids, spans, temperature, grammars=self._grammars)
            rows.append(processed_TV[at])
        return torch.cat(rows)


def sampled_at(item: TrainItem) -> Ints:
    """Which tokens of an item were sampled; the first of all has nothing before it, and is none."""
    at = np.flatnonzero(np.asarray(item.sample.sampled_mask, dtype=bool))
    return at[at > 0]
