"""Logprobs: of prompts, re-scored, seeded, batched, with a salt, and in which mode."""

from __future__ import annotations

import asyncio
import math

from lockstep.check.dialect import engine_data
from lockstep.check.outcome import NotApplicable, describe, difference, require, require_same
from lockstep.check.row import RowGroup
from lockstep.check.target import Target

GROUP = RowGroup("scores")


@GROUP.row("prompt", "a prompt token's logprob is its own", "F46")
async def prompt(target: Target) -> str:
    ids = target.prompt()
    completion = await target.one(ids, max_tokens=1, prompt_logprobs=2)
    entries = completion.prompt_logprobs
    require(entries is not None, f"prompt_logprobs 2 was asked for {len(ids)} ids, none came")
    entries = entries or []
    named = [entry.token_id for entry in entries if entry is not None]
    require(named == ids[-len(named) :] and len(named) >= len(ids) - 1, f"entries name {named}")
    first = "null" if entries[0] is None else f"{entries[0].logprob:.3f}"
    own = [entry for entry in entries if entry is not None]
    above = [entry for entry in own if entry.top and entry.logprob > entry.top[0].logprob]
    require(not above, f"token {above[0].token_id if above else 0} is above the most likely one")
    likely = sum(1 for entry in own if entry.top and entry.top[0].token_id == entry.token_id)
    return (
        f"{len(ids)} ids: {len(own)} entries, each naming its id, {likely} of them the most "
        f"likely; the first is {first}"
    )


@GROUP.row(
    "again", "scoring sampled tokens gives the logprobs they were sampled with", "L1 F44 F46"
)
async def again(target: Target) -> str:
    ids = target.prompt(seed=4)
    completion = await target.one(ids, temperature=1.0, seed=5, max_tokens=32)
    scored = (await target.score([*ids, *completion.token_ids]))[len(ids) - 1 :]
    off = difference(completion.logprobs, scored)
    evidence = f"32 tokens sampled at temperature 1, then scored as a prompt: {describe(off)}"
    require(off <= target.tolerance, f"{evidence} (tolerance {target.tolerance:g})")
    return evidence


@GROUP.row("seed", "the same seed gives the same tokens", "L1")
async def seed(target: Target) -> str:
    ids = target.prompt(seed=6)
    first, two, other = [
        await target.one(ids, temperature=1.0, seed=number, max_tokens=24) for number in (9, 9, 10)
    ]
    evidence = require_same(first, two, target.tolerance, "seed 9 twice")
    require(first.token_ids != other.token_ids, f"{evidence}; but seed 10 gives them too")
    return f"{evidence}; seed 10 gives others"


@GROUP.row("batch", "a response does not depend on other requests of its batch", "L1")
async def batch(target: Target) -> str:
    how = {"temperature": 1.0, "seed": 12, "max_tokens": 24}
    alone = await target.one(target.prompt(seed=7), **how)
    neighbours = [
        target.one(target.prompt(length, seed=length), **(how | {"seed": length}))
        for length in (5, 17, 29, 43, 61, 87, 113)
    ]
    crowded, *_ = await asyncio.gather(target.one(target.prompt(seed=7), **how), *neighbours)
    return require_same(alone, crowded, target.tolerance, "alone and among 7 others")


@GROUP.row("salt", "a cache salt is accepted and changes nothing", "F03")
async def salt(target: Target) -> str:
    ids = target.prompt(160, seed=8)
    bare = await target.one(ids)
    salted = [await target.one(ids, cache_salt=name) for name in ("check-a", "check-b")]
    evidence = [
        require_same(bare, completion, target.tolerance, "with and without salt")
        for completion in salted
    ]
    return f"{len(ids)} ids, two salts; {evidence[-1]}"


@GROUP.row("mode", "the mode of the logprobs is known: raw or processed", "F16")
async def mode(target: Target) -> str:
    ids = target.prompt(seed=13)
    warm, hot = [
        await target.one(ids, temperature=heat, seed=1, max_tokens=1, logprobs=3)
        for heat in (1.0, 2.0)
    ]
    tops = [{entry.token_id: entry.logprob for entry in (completion.top_logprobs or [()])[0]}
            for completion in (warm, hot)]  # fmt: skip
    common = sorted(tops[0].keys() & tops[1].keys())
    require(bool(common), "the most likely tokens at temperature 1 and 2 have none in common")
    token = common[0]
    values = [top[token] for top in tops]
    measured = "raw" if abs(values[0] - values[1]) <= target.tolerance else "processed"
    evidence = (
        f"token {token} has {values[0]:.4f} at temperature 1 and {values[1]:.4f} at 2: {measured}"
    )
    response = (await target.send_ids(ids)).fields
    stated = response.get("logprob_mode") or engine_data(response).get("logprob_mode")
    require(stated in (None, measured), f"{evidence}, but the server says {stated}")
    return f"{evidence}, as the server says" if stated else f"{evidence}; the server does not say"


@GROUP.row("support", "a token of a truncated distribution has the set it was drawn from", "F100")
async def support(target: Target) -> str:
    ids, k = target.prompt(seed=14), 6
    completion = await target.one(
        ids, temperature=1.0, top_k=k, top_p=0.9, seed=2, max_tokens=16, logprobs=2 * k
    )
    if completion.support is None:
        problem = "drawn with top_k 6 and top_p 0.9, and no sampling_mask came"
        # Only the embedded engine has a plan, on its own card and on that of a gateway before it.
        require(target.card.numerics is None, problem)
        raise NotApplicable(f"{problem}: samples of such requests have support: absent")
    require(completion.logprob_mode == "processed", "the logprobs beside a sampling_mask are raw")
    sets, tops = completion.support.lists(), completion.top_logprobs or []
    sizes = [len(own) for own in sets]
    evidence = (
        f"16 tokens drawn with top_k {k}, top_p 0.9 from sets of {min(sizes)} to {max(sizes)}"
    )
    for at, (own, top) in enumerate(zip(sets, tops, strict=True)):
        mass = sum(math.exp(entry.logprob) for entry in top if entry.token_id in own)
        require(
            len(own) > len(top) or abs(mass - 1) < 1e-3,
            f"{evidence}; the probabilities of the set of token {at} sum to {mass:.4f}, not to 1",
        )
    return f"{evidence}; each has its token, and probabilities that sum to 1"
