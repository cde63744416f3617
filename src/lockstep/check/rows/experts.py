"""Routed experts: a row for every forwarded token, from the requested position."""

from __future__ import annotations

from lockstep.check.outcome import Broken, NotApplicable, require
from lockstep.check.row import RowGroup
from lockstep.check.target import Target
from lockstep.tokens import Completion
from lockstep.tokens.errors import BadExperts, BadRequest

GROUP = RowGroup("experts")
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


async def routed(target: Target, start: int) -> Completion:
    """Return a completion with its experts. Raises NotApplicable for a model without experts."""
    count = next((target.config[name] for name in COUNTS if target.config.get(name)), 0)
    try:
        completion = await target.one(target.prompt(), max_tokens=8, experts_start=start)
    except (BadRequest, BadExperts) as error:
        # A server without experts says so or omits them; anything else is a broken response.
        if count or "none" not in error.message:
            raise
        raise NotApplicable(error.message) from None
    if completion.experts is not None:
        return completion
    if count:
        raise Broken(f"the model has {count} experts; they were asked for, and none came")
    raise NotApplicable("asked for, and none came; no config says that the model has experts")


@GROUP.row("rows", "routed experts have a row for every token but the last", "F38")
async def rows(target: Target) -> str:
    completion = await routed(target, 0)
    shape = completion.experts.shape if completion.experts else (0, 0, 0)
    total = len(completion.prompt_ids) + len(completion.token_ids)
    evidence = (
        f"{total} tokens: shape {shape}, {completion.experts.dtype if completion.experts else ''}"
    )
    require(shape[0] == total - 1, evidence)
    return evidence


@GROUP.row("start", "routed experts start at the requested row", "F38")
async def start(target: Target) -> str:
    whole, part = await routed(target, 0), await routed(target, 10)
    if whole.experts is None or part.experts is None:
        raise NotApplicable("no routed experts came")
    first, second = whole.experts.numpy(), part.experts.numpy()
    evidence = f"from 0: {first.shape[0]} rows; from {part.experts.start}: {second.shape[0]} rows"
    require(part.experts.start == 10, f"{evidence}; asked for from 10")
    require(bool((first[10:] == second).all()), f"{evidence}; and they differ")
    return f"{evidence}, the same as the last of the whole"
