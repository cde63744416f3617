"""Processing of logits before a token is drawn, shared by sampling, scoring and trainers.

All operations act on whole rows and are differentiable, so that a trainer gets the engine's bits
from the engine's own functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.engine.text.grammars import Grammars
from lockstep.tokens import Sampling, ShapedSpan, Shaping, Support
from lockstep.tokens.errors import BadRequest
from lockstep.tokens.grammar import Grammar

HIDDEN = float("-inf")
ROWS = 64
"""Rows of a scored sequence processed at once. Each may hold counts for the whole vocabulary."""
NEUTRAL = Shaping()


class TokenCounts:
    """Counts of each token in a completion, and whether it occurred in prompt or output."""

    def __init__(self, prompt_ids: Sequence[int], vocab: int, device: torch.device) -> None:
        self.output = torch.zeros(vocab, device=device)
        self.seen = torch.zeros(vocab, dtype=torch.bool, device=device)
        self.seen[list(prompt_ids)] = True

    def add(self, token: int) -> None:
        """Count a token of the completion."""
        self.output[token] += 1
        self.seen[token] = True

    def copy(self) -> TokenCounts:
        """Return a copy of the current counts."""
        twin = TokenCounts.__new__(TokenCounts)
        twin.output, twin.seen = self.output.clone(), self.seen.clone()
        return twin


class TokenLists:
    """`logit_bias` and `allowed_token_ids` as rows of the vocabulary.

    Made once for each request. With a list of thousands of tokens, making them takes longer than
    the step of a small model.
    """

    def __init__(self, options: Sampling | Shaping, vocab: int, device: torch.device) -> None:
        self.bias: Tensor | None = None
        self.hidden: Tensor | None = None
        if options.logit_bias:
            self.bias = torch.zeros(vocab, device=device)
            ids = torch.tensor(list(options.logit_bias), device=device)
            self.bias[ids] = torch.tensor(list(options.logit_bias.values()), device=device)
        if options.allowed_token_ids is not None:
            self.hidden = torch.ones(vocab, dtype=torch.bool, device=device)
            self.hidden[torch.tensor(options.allowed_token_ids, device=device)] = False

    @classmethod
    def of(cls, options: Sampling | Shaping, vocab: int, device: torch.device) -> TokenLists | None:
        """Return the lists of these options, or None if there are none."""
        if not options.logit_bias and options.allowed_token_ids is None:
            return None
        return cls(options, vocab, device)


class LogitsRow(NamedTuple):
    """How to process one row of logits.

    `banned` tokens are hidden until min_tokens. `counts` are required when the options penalize
    tokens. `allowed` is the mask of a grammar. `lists` are the options that list tokens, prepared
    once for all rows of a request.
    """

    options: Sampling | Shaping
    temperature: float
    banned: tuple[int, ...] = ()
    counts: TokenCounts | None = None
    allowed: Tensor | None = None
    lists: TokenLists | None = None

    @property
    def edits(self) -> bool:
        """Whether individual tokens are raised, lowered or hidden."""
        options = self.options
        return bool(
            self.banned
            or options.logit_bias
            or options.allowed_token_ids is not None
            or self.counts is not None
            or self.allowed is not None
        )


def restricts(options: Sampling) -> bool:
    """Return whether an option other than the temperature changes the sampled distribution."""
    return bool(
        options.logit_bias
        or options.allowed_token_ids is not None
        or options.grammar is not None
        or truncates(options)
        or penalizes(options)
    )


def penalizes(options: Sampling | Shaping) -> bool:
    """Return whether earlier tokens change the distribution of the next one."""
    return bool(
        options.presence_penalty or options.frequency_penalty or options.repetition_penalty != 1
    )


def truncates(options: Sampling | Shaping) -> bool:
    """Return whether only the most likely tokens can be drawn."""
    return bool(options.top_k or options.top_p < 1 or options.min_p)


def process(logits: Tensor, rows: Sequence[LogitsRow]) -> Tensor:
    """Return the logits to sample from: edited, divided by the temperature and truncated.

    Returns `logits` itself when no row changes them. Temperature 0 is treated as 1.
    """
    edited = [at for at, row in enumerate(rows) if row.edits]
    processed = _on_rows(logits, edited, lambda some: _edit(some, [rows[at] for at in edited]))
    temperatures = [row.temperature or 1.0 for row in rows]
    if any(temperature != 1.0 for temperature in temperatures):
        processed = processed / _column(temperatures, logits)
    cut = [at for at, row in enumerate(rows) if truncates(row.options)]
    return _on_rows(processed, cut, lambda some: _truncate(some, [rows[at].options for at in cut]))


def process_spans(
    logits: Tensor,
    token_ids: Sequence[int],
    spans: Sequence[ShapedSpan],
    temperature: float,
    *,
    first: int = 1,
    grammars: Grammars | None = None,
    support: Support | None = None,
) -> Tensor:
    """Return the logits of a sequence (tokens, vocab) as they were when its tokens were drawn.

    Row 0 predicts token `first`. Tokens outside all spans are only divided by the temperature.
    Where `support` (a row per token of the sequence) has the sets that the tokens were drawn from,
    these sets remain; elsewhere, the options of the span select tokens again. That needs `grammars`
    for a span with a grammar, else BadRequest is raised.
    """
    pieces: list[Tensor] = []
    at = 0
    for span in sorted(spans, key=lambda span: span.start):
        start = max(span.start - first, 0)
        pieces.append(_apply_temperature(logits[at:start], temperature))
        at = start
        begin = max(first, span.start)
        recorded = None if support is None else support.slice(begin, span.end)
        if recorded is not None and recorded.recorded().any():
            rows = _replayed_rows(span, token_ids, temperature, logits, begin, recorded)
        else:
            rows = _span_rows(span, token_ids, temperature, logits, begin, grammars)
        while chunk := [row for _, row in zip(range(ROWS), rows, strict=False)]:
            pieces.append(process(logits[at : at + len(chunk)], chunk))
            at += len(chunk)
    pieces.append(_apply_temperature(logits[at:], temperature))
    return torch.cat(pieces)


def _span_rows(
    span: ShapedSpan,
    token_ids: Sequence[int],
    temperature: float,
    logits: Tensor,
    first: int,
    grammars: Grammars | None,
) -> Iterator[LogitsRow]:
    """Yield how each token of a span was drawn, from token `first` on."""
    shaping = span.shaping
    counts = matcher = None
    lists = TokenLists.of(shaping, logits.shape[-1], logits.device)
    if penalizes(shaping):
        counts = TokenCounts(token_ids[: span.start], logits.shape[-1], logits.device)
    if shaping.grammar is not None:
        matcher = _require_grammars(grammars, shaping.grammar).matcher(shaping.grammar)
    for position in range(span.start, span.end):
        if position >= first:
            early = position - span.start < shaping.min_tokens
            yield LogitsRow(
                shaping,
                temperature,
                shaping.end_ids if early else (),
                None if counts is None else counts.copy(),
                None if matcher is None else matcher.mask(shaping.end_ids),
                lists,
            )
        token = token_ids[position]
        if counts is not None:
            counts.add(token)
        if matcher is not None and token not in shaping.end_ids:
            matcher.consume(token)
            if matcher.error:
                raise BadRequest(
                    f"token {token} at position {position} does not fit the grammar: "
                    f"{matcher.error}",
                    param="structured_outputs",
                )


def _replayed_rows(
    span: ShapedSpan,
    token_ids: Sequence[int],
    temperature: float,
    logits: Tensor,
    first: int,
    recorded: Support,
) -> Iterator[LogitsRow]:
    """Yield how each token of a span was drawn, from token `first` on, given their sets.

    The sets contain the effect of all options but those that change relative probabilities.
    """
    shaping = span.shaping
    weighting = Shaping(
        presence_penalty=shaping.presence_penalty,
        frequency_penalty=shaping.frequency_penalty,
        repetition_penalty=shaping.repetition_penalty,
        logit_bias=shaping.logit_bias,
    )
    whole = ShapedSpan(span.start, span.end, weighting)
    rows = _span_rows(whole, token_ids, temperature, logits, first, None)
    for at, row in enumerate(rows):
        if at % ROWS == 0:  # masks take a byte per token of the vocabulary
            masks = recorded.slice(at, at + ROWS).keep(logits.shape[-1])
        yield row._replace(allowed=torch.from_numpy(masks[at % ROWS]))


def _require_grammars(grammars: Grammars | None, grammar: Grammar) -> Grammars:
    if grammars is None:
        raise BadRequest(
            f"tokens were held to the grammar {grammar.digest}: their processed logprobs need "
            "`grammars`, made of the model's tokenizer",
            param="grammars",
        )
    return grammars


def _apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature in (0.0, 1.0) else logits / temperature


def _on_rows(logits: Tensor, at: list[int], change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the logits with `change` applied to the rows `at`, without copying if all change."""
    if not at:
        return logits
    if len(at) == len(logits):
        return change(logits)
    index = torch.tensor(at, device=logits.device)
    return logits.index_copy(0, index, change(logits.index_select(0, index)))


def _edit(logits: Tensor, rows: list[LogitsRow]) -> Tensor:
    """Apply biases, then penalties, then masks: vLLM's order."""
    lists = [
        row.lists or TokenLists.of(row.options, logits.shape[-1], logits.device) for row in rows
    ]
    if any(listed is not None and listed.bias is not None for listed in lists):
        bias = torch.zeros_like(logits)
        for at, listed in enumerate(lists):
            if listed is not None and listed.bias is not None:
                bias[at] = listed.bias
        logits = logits + bias
    if any(row.counts is not None for row in rows):
        logits = _penalize(logits, rows)
    hidden: Tensor | None = None
    for at, (row, listed) in enumerate(zip(rows, lists, strict=True)):
        barred = None if listed is None else listed.hidden
        if barred is None and row.allowed is None and not row.banned:
            continue
        if hidden is None:
            hidden = torch.zeros_like(logits, dtype=torch.bool)
        if barred is not None:
            hidden[at] = barred
        if row.allowed is not None:
            hidden[at] |= ~row.allowed.to(hidden.device)
        hidden[at, list(row.banned)] = True
    return logits if hidden is None else logits.masked_fill(hidden, HIDDEN)


def _penalize(logits: Tensor, rows: list[LogitsRow]) -> Tensor:
    """Apply each row's penalties to the logits of tokens that occurred before."""
    none = torch.zeros(logits.shape[-1], device=logits.device)
    output = torch.stack([none if row.counts is None else row.counts.output for row in rows])
    seen = torch.stack([none.bool() if row.counts is None else row.counts.seen for row in rows])
    repetition = _column([row.options.repetition_penalty for row in rows], logits)
    frequency = _column([row.options.frequency_penalty for row in rows], logits)
    presence = _column([row.options.presence_penalty for row in rows], logits)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen, repeated, logits)
    return logits - frequency * output - presence * (output > 0)


def _truncate(logits: Tensor, options: Sequence[Sampling | Shaping]) -> Tensor:
    """Hide all tokens except those that top_k, top_p and min_p keep."""
    # Which tokens remain is not differentiable; the gradient flows through their logits only. The
    # sort is stable, so that ties are cut at the same token in the engine and in the trainer.
    with torch.no_grad():
        ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
        vocab = logits.shape[-1]
        ranks = torch.arange(vocab, device=logits.device)
        keep = ranks < _column([option.top_k or vocab for option in options], logits)
        probs = torch.softmax(ordered.masked_fill(~keep, HIDDEN), dim=-1)
        # Rounded sums may exceed 1 before the last token: without top_p nothing is cut there.
        limits = [option.top_p if option.top_p < 1 else torch.inf for option in options]
        keep &= probs.cumsum(dim=-1) - probs < _column(limits, logits)
        keep &= probs >= _column([option.min_p for option in options], logits) * probs[:, :1]
        hidden = torch.ones_like(keep).scatter(-1, ids, ~keep)
    return logits.masked_fill(hidden, HIDDEN)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
