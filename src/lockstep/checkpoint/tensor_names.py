"""Tensor names of a set of weights: all of the model's and no others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lockstep.tokens.errors import CheckpointError

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
"""Head of a model. If it is tied, it equals the embedding: it may be missing, but not differ."""
DERIVED = "rotary_emb.inv_freq"
"""Suffix of tensors that old checkpoints contain and every engine computes itself."""
SHOWN = 3


def check_names(
    names: Iterable[str],
    model: Iterable[str],
    where: str,
    *,
    tied: bool,
    partial: bool = False,
) -> None:
    """Raise CheckpointError naming the tensors that are unknown to the model or missing.

    `where` names the container in errors. `partial` weights may omit tensors.
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
    """Return the error for a tied head that differs from the embedding: only one was updated."""
    return CheckpointError(
        f"{HEAD} of {where} differs from {EMBEDDING}, but the served model ties them: leave it "
        "out, or serve a model with tie_word_embeddings false"
    )


def listed(names: Sequence[str]) -> str:
    """Return the first few names as text."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"tensor{'s' * (len(names) > 1)} {', '.join(map(repr, names[:SHOWN]))}{more}"
