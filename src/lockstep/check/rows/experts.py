"""Routed experts: a row for every forwarded token, from where they were asked for."""

from __future__ import annotations

from lockstep.check.outcome import Broken, NotApplicable, require
from lockstep.check.row import RowGroup
from lockstep.check.target import Target
from lockstep.tokens import Completion
from lockstep.tokens.errors import BadExperts, BadRequest

GROUP = RowGroup("experts")
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


async def routed(target: Target, start: int) -> Completion:
    """A completion with its experts. Raises NotApplicable for a model that has none."""
    count = next((target.config[name] for name in COUNTS if target.config.get(name)), 0)
    try:
        done = await target.one(target.prompt(), max_tokens=8, experts_start=start)
    except (BadRequest, BadExperts) as error:
        # A server without them says so, or answers without; anything else is a broken answer.
        if count or "none" not in error.message:
            raise
        raise NotApplicable(error.message) from None
    if done.experts is not None:
        return done
    if count:
        raise Broken(f"the model has {count} experts; they were asked for, and none came")
    raise NotApplicable("asked for, and none came; no config says that the model has experts")


@GROUP.row("rows", "routed experts have a row for every token but the last", "F38")
async def rows(target: Target) -> str:
    done = await routed(target, 0)
    shape = done.experts.shape if done.experts else (0, 0, 0)
    total = len(done.prompt_ids) + len(done.token_ids)
    said = f"{total} tokens: shape {shape}, {done.experts.dtype if done.experts else ''}"
    require(shape[0] == total - 1, said)
    return said


@GROUP.row("start", "routed experts start where they were asked for", "F38")
async def start(target: Target) -> str:
    whole, part = await routed(target, 0), await routed(target, 10)
    if whole.experts is None or part.experts is None:
        raise NotApplicable("no routed experts came")
    first, second = whole.experts.numpy(), part.experts.numpy()
    said = f"from 0: {first.shape[0]} rows; from {part.experts.start}: {second.shape[0]} rows"
    require(part.experts.start == 10, f"{said}; asked for from 10")
    require(bool((first[10:] == second).all()), f"{said}; and they differ")
    return f"{said}, the same as the last of the whole"
