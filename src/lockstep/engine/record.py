"""The completion of a finished sequence, with its routed experts and supports."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.engine.options import EngineOptions
from lockstep.engine.sequence import Sequence
from lockstep.tokens import Completion, Finish, PromptLogprob, RoutedExperts, Support, merge_spans


def completion(
    sequence: Sequence,
    finish: Finish,
    experts: RoutedExperts | None,
    options: EngineOptions,
    vocab: int,
) -> Completion:
    """Return the completion of a sequence of an engine with these options."""
    sampling = sequence.request.sampling
    return Completion(
        token_ids=sequence.output_ids,
        logprobs=sequence.logprobs,
        prompt_ids=sequence.request.prompt_ids,
        finish=finish,
        versions=merge_spans(sequence.versions),
        logprob_mode=sampling.logprob_mode or options.logprob_mode,
        temperature=sampling.temperature,
        shaping=sequence.shaping,
        index=sequence.index,
        request_id=sequence.request.request_id,
        stop_token=sequence.stop_token,
        stop_reason=None if sequence.stop_match is None else sequence.stop_match.stop,
        stop_tokens=None if sequence.stop_match is None else sequence.stop_match.tokens,
        top_logprobs=sequence.tops if sampling.logprobs else None,
        ranks=sequence.ranks,
        prompt_logprobs=_prompt_logprobs(sequence),
        worker=options.worker,
        adapter=sequence.request.adapter,
        experts=experts,
        support=_support(sequence, vocab),
    )


def experts_of(sequence: Sequence, rows: Tensor) -> RoutedExperts | None:
    """Return the requested routed experts, or None when not all of them were computed.

    `rows` are the experts of all computed tokens of the sequence, read from its slot.
    """
    start, last = sequence.request.experts_start, len(sequence.tokens) - 1
    if start is None:
        return None
    whole = sequence.experts_with(rows)
    if len(whole) < last:
        return None
    array = whole[start:last].cpu().contiguous().numpy()
    dtype = "uint8" if rows.dtype == torch.uint8 else "uint16"
    return RoutedExperts(array.tobytes(), array.shape, dtype, start)


def _support(sequence: Sequence, vocab: int) -> Support | None:
    """Return the recorded supports, or None unless every token has one."""
    rows = sequence.supports
    if rows is None or len(rows) != sequence.generated:
        return None
    return Support.of_rows(rows, vocab)


def _prompt_logprobs(sequence: Sequence) -> list[PromptLogprob | None] | None:
    """Return the prompt logprobs, or None unless the whole prompt was scored.

    Only the first choice scores the prompt; the others share its result.
    """
    scored = (sequence.leader or sequence).prompt_logprobs
    requested = sequence.request.sampling.prompt_logprobs is not None
    return scored if requested and len(scored) == sequence.prompt_len else None
