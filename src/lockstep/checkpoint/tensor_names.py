"""Which tensors a set of weights must hold: all of the model's and no others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lockstep.tokens.errors import CheckpointError

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
"""Of a model that ties them, the head is the embedding: it may be left out, and must not differ."""
DERIVED = "rotary_emb.inv_freq"
"""Ends the names of tensors that old checkpoints hold and every engine computes itself."""
SHOWN = 3


def check_names(
    names: Iterable[str],
    model: Iterable[str],
    where: str,
    *,
    tied: bool,
    partial: bool = False,
) -> None:
    """Raises CheckpointError that names the tensors that the model has not, or that are missing.

    `where` says in errors what holds them. `partial` weights may leave tensors out.
    """
    present = {name for name in names if not name.endswith(DERIVED)}
    needed = {name for name in model if not name.endswith(DERIVED)}
    optional = {HEAD} if tied else set()
    if not present:
        raise CheckpointError(f"{where} holds no tensors")
    if (missing := sorted(needed - present - optional)) and not partial:
        raise CheckpointError(
            f"{where} lacks {listed(missing)} of the served model: save or send all tensors, or "
            "set partial where the others shall stay as they are",
            param="tensors",
        )
    if extra := sorted(present - needed - optional):
        raise CheckpointError(
            f"{where} has {listed(extra)}, which the served model has not", param="tensors"
        )


def tied_head_differs(where: str) -> CheckpointError:
    """The error for a head that is not the embedding it is tied to: half of a pair was updated."""
    return CheckpointError(
        f"{HEAD} of {where} differs from {EMBEDDING}, but the served model ties them: leave it "
        "out, or serve a model with tie_word_embeddings false"
    )


def listed(names: Sequence[str]) -> str:
    """The first few names in words."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"tensor{'s' * (len(names) > 1)} {', '.join(map(repr, names[:SHOWN]))}{more}"
