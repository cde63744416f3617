"""Prompt logprobs of every dialect, flattened in one place: the prompt token's own entry counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from lockstep.tokens import PromptLogprob, Ranked
from lockstep.tokens.completion import usable
from lockstep.tokens.errors import BadLogprob, Misaligned


class PromptEntry(msgspec.Struct, gc=False):
    logprob: float | None = None
    rank: int | None = None


PromptField = list[dict[str, PromptEntry] | None]


def flatten(
    prompt_ids: Sequence[int],
    entries: Sequence[Mapping[Any, Any] | None],
    *,
    top: int = 0,
    allow_nonfinite: bool = False,
) -> list[PromptLogprob | None]:
    """One entry per prompt token, None at the first, which nothing precedes.

    Takes vLLM's dicts (keys are ids, values objects with logprob and rank) and the string-keyed
    dicts of JSON answers, whose values are objects, dicts or bare numbers. `top` alternatives
    are kept, the most likely first. Raises Misaligned when there is not one entry per token, and
    BadLogprob with the position where the token's own entry is missing or no finite number.
    """
    if len(entries) != len(prompt_ids):
        raise Misaligned(f"{len(prompt_ids)} prompt ids but {len(entries)} prompt logprobs")
    result: list[PromptLogprob | None] = [None]
    for at in range(1, len(prompt_ids)):
        token = prompt_ids[at]
        found = entries[at]
        own = None if found is None else found.get(token, found.get(str(token)))
        if found is None or own is None:
            raise BadLogprob(
                f"prompt logprob at position {at} is missing: no entry for token {token}"
            )
        logprob, rank = _number(own)
        if logprob is None or not (allow_nonfinite or usable(logprob)):
            raise BadLogprob(f"prompt logprob at position {at} is {logprob}, expected a number")
        others: tuple[Ranked, ...] = ()
        if top:
            others = most_likely(
                (Ranked(int(key), *_known(_number(value), at)) for key, value in found.items()), top
            )
        result.append(PromptLogprob(token, logprob, rank, others))
    return result


def most_likely(candidates: Iterable[Ranked], top: int) -> tuple[Ranked, ...]:
    """The `top` most likely, by rank where ranks are known, else by logprob.

    Engines add the token itself to the list whatever its rank: it only stays when it belongs.
    """
    every = list(candidates)
    if all(one.rank is not None for one in every):
        every = [one for one in every if (one.rank or 0) <= top]
        every.sort(key=lambda one: one.rank or 0)
    else:
        every.sort(key=lambda one: -one.logprob)
    return tuple(every[:top])


def _number(entry: Any) -> tuple[float | None, int | None]:
    if isinstance(entry, int | float):
        return float(entry), None
    if isinstance(entry, Mapping):
        return entry.get("logprob"), entry.get("rank")
    return entry.logprob, entry.rank


def _known(entry: tuple[float | None, int | None], at: int) -> tuple[float, int | None]:
    if entry[0] is None:
        raise BadLogprob(f"an alternative of prompt position {at} has no logprob")
    return entry[0], entry[1]
