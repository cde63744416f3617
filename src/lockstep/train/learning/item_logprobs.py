"""The learner's forward passes over train items: logprobs and entropies of their sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.engine.expert_replay import ExpertReplay
from lockstep.engine.forward_pass import (
    Ints,
    TokenRows,
    chosen_logprobs,
    entropies,
    packs,
    shaped_logits,
    tempered_logprobs,
    token_logits,
)
from lockstep.engine.numerics.prefix_tree import in_tree_order, shared_lengths
from lockstep.engine.text.grammars import Grammars
from lockstep.train.config import TrainConfig
from lockstep.train.learning.batch import TrainItem

MOST_COPIES = 8
"""Keys that the attention of a pass copies, for each token that it may compute."""


class ItemLogprobs:
    """Scores the sampled tokens of train items with a model.

    Values are flat, over the sampled tokens of one item after another (`sampled_at` gives their
    positions). Names of such tensors end in N.
    """

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

    def passes(self, items: Sequence[TrainItem]) -> list[list[int]]:
        """Return the indices of the items of each forward pass."""
        sequences = [item.sample.token_ids for item in items]
        if not packs(self._model):  # by length, so that a pass has little padding
            order = sorted(range(len(items)), key=lambda at: len(sequences[at]))
        elif self._replay is not None:
            order = list(range(len(items)))
        else:
            return tree_passes(sequences, self._config.learner.pass_tokens)
        passes: list[list[int]] = []
        tokens = 0
        for at in order:
            length = len(sequences[at])
            if not passes or tokens + length > self._config.learner.pass_tokens:
                passes.append([])
                tokens = 0
            passes[-1].append(at)
            tokens += length
        return passes

    def score(self, items: Sequence[TrainItem], positions: Sequence[Ints]) -> tuple[Tensor, Tensor]:
        """Return the logprobs of the tokens at `positions` (N,) and the entropies there (N,).

        `positions[i]` is `sampled_at(items[i])`. Logprobs are normalised over the recorded
        supports. Where none was recorded, a token that these weights cannot draw has -inf.
        """
        chosen_N, entropy_N, _ = self.score_whole(items, positions)
        return chosen_N, entropy_N

    def score_whole(
        self, items: Sequence[TrainItem], positions: Sequence[Ints]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `score` returns, and the logprobs of the whole vocabulary there (N, V)."""
        rows = self._arrange(items)
        with self._experts(items, rows):
            own_NV, ids_N = token_logits(self._model, rows, positions)
        processed = self._config.rollout.logprobs == "processed"
        shaped = processed and any(item.sample.shaping for item in items)
        temperature = self._config.rollout.temperature if processed else 1.0
        if shaped:
            shaped_NV = self._shape(own_NV.float(), items, positions)
            logprobs_NV = torch.log_softmax(shaped_NV, dim=-1)
        else:
            logprobs_NV = tempered_logprobs(own_NV, temperature)
        if own_NV.is_cuda and not shaped:
            chosen_N = chosen_logprobs(own_NV, ids_N, temperature)
        else:
            chosen_N = logprobs_NV.gather(-1, ids_N[:, None]).squeeze(-1)
        with torch.no_grad():
            finite_NV = logprobs_NV
            if shaped:  # a token that cannot be drawn adds 0, where p log p = 0 * -inf is NaN
                finite_NV = logprobs_NV.masked_fill(logprobs_NV == -torch.inf, 0.0)
            entropy_N = entropies(finite_NV)
        return chosen_N, entropy_N, logprobs_NV

    def _arrange(self, items: Sequence[TrainItem]) -> TokenRows:
        sequences = [item.sample.token_ids for item in items]
        if self._replay is not None:
            # Versions may route the same prompt to different experts, so each sample keeps its own
            # prompt; and no experts were recorded for tokens that only pad a row.
            multiple = 1 if packs(self._model) else None
            return TokenRows.arrange(self._model, sequences, share=False, multiple=multiple)
        return TokenRows.arrange(self._model, sequences)

    def _experts(self, items: Sequence[TrainItem], rows: TokenRows) -> AbstractContextManager[None]:
        """Replay the recorded experts of the items in these rows."""
        if self._replay is None:
            return nullcontext()
        samples = [item.sample for item in items]
        return self._replay.of(samples, rows.width, self._model.device)

    def _shape(
        self, logits_NV: Tensor, items: Sequence[TrainItem], positions: Sequence[Ints]
    ) -> Tensor:
        """Return the logits of the distributions that the tokens were drawn from, over the recorded
        supports.
        """
        temperature = self._config.rollout.temperature
        parts = logits_NV.split([len(at) for at in positions])
        return torch.cat([
            shaped_logits(
                own_NV, at, item.sample.token_ids, item.sample.shaping, temperature,
                grammars=self._grammars, support=item.sample.support,
            )
            for own_NV, item, at in zip(parts, items, positions, strict=True)
        ])  # fmt: skip


def tree_passes(sequences: Sequence[Sequence[int]], pass_tokens: int) -> list[list[int]]:
    """Return the indices of the sequences of each pass, in which shared prefixes are computed once.

    Such a prefix counts once in the tokens of a pass. Every sequence copies its keys for attention,
    which is why a pass may also have no more than `MOST_COPIES` times as many tokens in all.
    """
    order = in_tree_order(sequences)
    shared = [0, *shared_lengths([sequences[at] for at in order])]
    passes: list[list[int]] = []
    computed = copied = 0
    for at, common in zip(order, shared, strict=True):
        length = len(sequences[at])
        if (
            not passes
            or computed + length - common > pass_tokens
            or copied + length > MOST_COPIES * pass_tokens
        ):
            passes.append([])
            computed = copied = common = 0
        passes[-1].append(at)
        computed, copied = computed + length - common, copied + length
    return passes


def sampled_at(item: TrainItem) -> Ints:
    """Return the positions of an item's sampled tokens, without position 0: nothing predicts it."""
    at = np.flatnonzero(np.asarray(item.sample.sampled_mask, dtype=bool))
    return at[at > 0]
