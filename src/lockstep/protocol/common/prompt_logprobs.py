"""vLLM's `prompt_logprobs`, which every dialect uses: logprobs by token id per position."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from lockstep.tokens import PromptLogprob, Ranked
from lockstep.tokens.completion import usable
from lockstep.tokens.errors import BadLogprob, Misaligned


class PromptEntry(msgspec.Struct, gc=False):
    """Logprob of one token at one position of the prompt."""

    logprob: float | None = None
    rank: int | None = None
    decoded_token: str | None = None


IMPOSSIBLE = float("-inf")
PromptField = list[dict[str, PromptEntry] | None]


def decode_prompt_logprobs(
    prompt_ids: Sequence[int], field: PromptField, *, top: int = 0, allow_nonfinite: bool = False
) -> list[PromptLogprob | None]:
    """Return one entry per prompt token, None for the first, which has no predecessor.

    Keep `top` alternatives, the most likely first. Raises Misaligned unless there is one entry per
    token, and BadLogprob with the position if the token's own entry is missing or not finite; with
    `allow_nonfinite` null is -inf, for a token that could not have been drawn.
    """
    if len(field) != len(prompt_ids):
        raise Misaligned(f"{len(prompt_ids)} prompt ids but {len(field)} prompt logprobs")
    result: list[PromptLogprob | None] = [None]
    for at in range(1, len(prompt_ids)):
        token, entries = prompt_ids[at], field[at]
        own = None if entries is None else entries.get(str(token))
        if entries is None or own is None:
            raise BadLogprob(
                f"prompt logprob at position {at} is missing: no entry for token {token}"
            )
        logprob = IMPOSSIBLE if own.logprob is None and allow_nonfinite else own.logprob
        if logprob is None or not (allow_nonfinite or usable(logprob)):
            raise BadLogprob(f"prompt logprob at position {at} is {logprob}, expected a number")
        others: tuple[Ranked, ...] = ()
        if top:
            others = most_likely((_ranked(key, entry, at) for key, entry in entries.items()), top)
        result.append(PromptLogprob(token, logprob, own.rank, others))
    return result


def encode_prompt_logprobs(
    prompt: Sequence[PromptLogprob | None] | None,
    text_of: Callable[[int], str | None] | None = None,
) -> PromptField | None:
    """Return the field for these logprobs: per position the token itself, then the alternatives.

    `text_of` returns the text of a token, if the dialect shows it.
    """
    if prompt is None:
        return None
    field: PromptField = []
    for own in prompt:
        if own is None:
            field.append(None)
            continue
        place: dict[str, PromptEntry] = {}
        every: tuple[PromptLogprob | Ranked, ...] = (own, *own.top)
        for entry in every:
            key, text = str(entry.token_id), None if text_of is None else text_of(entry.token_id)
            # JSON has no infinity: a token that could not have been drawn has null.
            logprob = None if entry.logprob == IMPOSSIBLE else entry.logprob
            place.setdefault(key, PromptEntry(logprob, entry.rank, text))
        field.append(place)
    return field


def most_likely(candidates: Iterable[Ranked], top: int) -> tuple[Ranked, ...]:
    """Return the `top` most likely entries, by rank if ranks are known, else by logprob.

    Engines add the token itself to the list at any rank: keep it only if it belongs there.
    """
    every = list(candidates)
    if all(entry.rank is not None for entry in every):
        every = [entry for entry in every if (entry.rank or 0) <= top]
        every.sort(key=lambda entry: entry.rank or 0)
    else:
        every.sort(key=lambda entry: -entry.logprob)
    return tuple(every[:top])


def _ranked(key: str, entry: PromptEntry, at: int) -> Ranked:
    if entry.logprob is None:
        raise BadLogprob(f"an alternative of prompt position {at} has no logprob")
    return Ranked(int(key), entry.logprob, entry.rank)
