"""One forward pass per step: prompt logprobs and sampled tokens for the scheduled work."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from lockstep.engine.kv.cache import SlotCache
from lockstep.engine.model.model import Model, Segment
from lockstep.engine.options import EngineOptions
from lockstep.engine.processing import TokenCounts, TokenLists, penalizes, process_spans
from lockstep.engine.sampler import Sampled, SamplingRow, sample, score, top_logprobs, uniform
from lockstep.engine.scheduler import Work
from lockstep.engine.sequence import Sequence
from lockstep.engine.text.grammars import Grammars
from lockstep.engine.weights.weights import Weights
from lockstep.tokens import LockstepError, PromptLogprob, ShapedSpan


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Result of a batch: works that computed NaN or infinity, and tokens of the others.

    A broken work appears only in `broken` and counts as not computed.
    """

    broken: Seq[Work]
    sampled: Seq[tuple[Work, Sampled]]


class ModelRunner:
    """Runner of one step: all its works go through the model in one forward pass."""

    def __init__(
        self, model: Model, cache: SlotCache, options: EngineOptions, grammars: Grammars
    ) -> None:
        self._grammars = grammars
        self._model = model
        self._cache = cache
        self._mode = options.logprob_mode
        # If the last layer has experts, every token must go through it to record its routing.
        self._routes_last = model.config.layers - 1 in model.config.moe_layers

    def run(self, weights: Weights, works: Seq[Work]) -> BatchResult:
        """Compute the works and store requested prompt logprobs in their sequences."""
        segments = [self._segment(work) for work in works]
        hidden = self._model.forward(weights, self._cache, self._model.batch(segments))
        ends = list(accumulate(segment.outputs for segment in segments))
        broken = self._broken(works, hidden, ends)
        sampling: list[Work] = []
        rows: list[int] = []
        for work, end in zip(works, ends, strict=True):
            if work in broken:
                continue
            if work.sequence.wants_prompt_logprobs:
                self.score_prompt(weights, work, hidden, end - work.count)
            if work.samples:
                sampling.append(work)
                rows.append(end - 1)
        # After scoring, which counts positions from `computed`.
        for work in works:
            work.sequence.computed += 0 if work in broken else work.count
        if not sampling:
            return BatchResult(broken, ())
        adapters = [work.sequence.adapter for work in sampling]
        logits = self._model.logits(weights, hidden, rows, adapters)
        tokens = sample(logits, [self.sampling_row(work.sequence) for work in sampling])
        return BatchResult(broken, list(zip(sampling, tokens, strict=True)))

    def _segment(self, work: Work) -> Segment:
        """Return the segment of a work, with hidden states only where logits are needed."""
        sequence, count = work.sequence, work.count
        tokens = sequence.tokens[sequence.computed : sequence.computed + count]
        every = count == 1 or sequence.wants_prompt_logprobs or self._routes_last
        outputs = count if every else int(work.samples)
        return Segment(work.slot, sequence.computed, tokens, outputs, sequence.adapter)

    def _broken(self, works: Seq[Work], hidden: Tensor, ends: list[int]) -> list[Work]:
        """Return the works whose hidden states, keys or values are not finite."""
        # A sum is finite only if all its terms are, so one reduction and one device sync cover
        # the whole batch in the usual case.
        if math.isfinite(hidden.sum().item()) and all(
            work.count == 1 or self._wrote_finite(work) for work in works
        ):
            return []
        return [
            work
            for work, start, end in zip(works, [0, *ends], ends, strict=False)
            if not bool(torch.isfinite(hidden[start:end]).all()) or not self._wrote_finite(work)
        ]

    def _wrote_finite(self, work: Work) -> bool:
        """Return whether the keys and values that a work wrote are finite.

        This covers tokens for which no hidden state is returned.
        """
        start = work.sequence.computed
        return self._cache.finite(work.slot, start, start + work.count)

    def score_prompt(self, weights: Weights, work: Work, hidden: Tensor, row: int) -> None:
        """Append the logprobs of the prompt tokens that the rows of a work, from `row` on,
        predict."""
        sequence, options = work.sequence, work.sequence.request.sampling
        first = sequence.computed + 1
        targets = sequence.tokens[first : min(first + work.count, sequence.prompt_len)]
        if not targets or options.prompt_logprobs is None or sequence.error is not None:
            return
        adapters = [sequence.adapter] * len(targets)
        logits = self._model.logits(weights, hidden, range(row, row + len(targets)), adapters)
        if (options.logprob_mode or self._mode) == "processed":
            spans = self._scored_spans(sequence, first, len(targets))
            window = sequence.tokens[: first + len(targets)]
            try:
                logits = process_spans(
                    logits, window, spans, options.temperature, first=first, grammars=self._grammars
                )
            except LockstepError as error:
                # Not raised: that would fail the other requests of the step as well.
                sequence.error = error
                return
        logprobs = torch.log_softmax(logits, dim=-1)
        ids = torch.tensor(targets, device=hidden.device)
        token_logprobs, ranks = score(logprobs, ids)
        tops = top_logprobs(logprobs, [options.prompt_logprobs] * len(targets))
        sequence.prompt_logprobs += [
            PromptLogprob(*fields)
            for fields in zip(targets, token_logprobs.tolist(), ranks.tolist(), tops, strict=True)
        ]

    def _scored_spans(self, sequence: Sequence, first: int, count: int) -> list[ShapedSpan]:
        """Return the span of prompt tokens that are scored as if they had been sampled.

        Only the `count` tokens from `first` on are considered.
        """
        start, shaping = sequence.request.sampling.score_start, sequence.shaping
        if start is None or shaping is None or start >= first + count:
            return []
        return [ShapedSpan(start, first + count, shaping)]

    def sampling_row(self, sequence: Sequence) -> SamplingRow:
        """Return how to sample the next token of a sequence."""
        options = sequence.request.sampling
        vocab, device = self._model.config.vocab_size, self._cache.k.device
        if sequence.lists is None:
            first = sequence.leader
            lists = first.lists if first is not None else None
            sequence.lists = lists or TokenLists.of(options, vocab, device)
        if sequence.counts is None and penalizes(options):
            sequence.counts = TokenCounts(sequence.request.prompt_ids, vocab, device)
            for token in sequence.output_ids:  # tokens that a request brought with it
                sequence.counts.add(token)
        return SamplingRow(
            options,
            options.logprob_mode or self._mode,
            uniform(sequence.seed, sequence.generated),
            banned=sequence.end_ids if sequence.generated < options.min_tokens else (),
            counts=sequence.counts,
            lists=sequence.lists,
            allowed=None if sequence.matcher is None else sequence.matcher.mask(sequence.end_ids),
            support=sequence.supports is not None,
        )
