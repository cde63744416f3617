"""Validation of token ids from outside against the vocabulary."""

from __future__ import annotations

from lockstep.tokens.errors import BadTokenId


def check_ids(ids: list[int], vocab_size: int, field: str = "token_ids") -> None:
    """Raise BadTokenId for the first id outside [0, vocab_size), or for an empty list."""
    if not ids:
        raise BadTokenId(f"{field} is empty: at least one token id is needed", param=field)
    if min(ids) >= 0 and max(ids) < vocab_size:
        return
    at = next(i for i, token in enumerate(ids) if not 0 <= token < vocab_size)
    raise BadTokenId(
        f"{field}[{at}] is {ids[at]}: token ids of this model are 0 to {vocab_size - 1}",
        param=f"{field}[{at}]",
    )
