"""Scores of the samples by the live server, and its own noise."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.client.policy import Policy, connect
from lockstep.explain.case import Case, Values
from lockstep.tokens import Sample


@dataclass(frozen=True, slots=True)
class ServerScores:
    """Raw logprobs that a server computes for the compared tokens; NaN where it was not asked.

    `noise` are mean and highest difference of two scorings of the same tokens, alone and in one
    batch. `version` is the label it reports, `dtype` what its model card says, if anything.
    """

    values: Values
    noise: tuple[float, float]
    version: str
    dtype: str | None
    requests: int


def server_scores(
    case: Case,
    url: str,
    *,
    model: str | None = None,
    api_key: str | None = None,
    most_requests: int = 32,
    on_request: Callable[[], None] = lambda: None,
) -> ServerScores:
    """Ask a server to score the samples as prompts, which changes nothing on it.

    Each sample is scored alone and again in a batch of all, with at most `most_requests` requests.
    Raises a LockstepError if the server cannot be reached or cannot score. Not for a thread that
    runs an event loop.
    """
    return asyncio.run(_scores(case, url, model, api_key, most_requests, on_request))


async def server_dtype(url: str, model: str | None, api_key: str | None) -> str | None:
    """Return the dtype that the server's model card states, or None."""
    async with connect(url, model, api_key=api_key) as policy:
        return await _dtype(policy)


async def _dtype(policy: Policy) -> str | None:
    cards = await policy.models()
    named = [card for card in cards if card.id == policy.model] or cards
    plan = getattr(named[0], "numerics", None) if named else None
    return None if plan is None else str(plan.dtype)


async def _scores(
    case: Case, url: str, model: str | None, api_key: str | None, most: int,
    on_request: Callable[[], None],
) -> ServerScores:  # fmt: skip
    indices = sorted({group.sample for group in case.groups})[: max(1, most // 2)]
    async with connect(url, model, api_key=api_key) as policy:

        async def score(sample: Sample) -> tuple[list[float], str]:
            scores = await policy.score(sample.token_ids)
            on_request()
            return scores.logprobs, scores.version

        alone = [await score(case.samples[at]) for at in indices]
        batch = await asyncio.gather(*(score(case.samples[at]) for at in indices))
        dtype = await _dtype(policy)
    first = _spread(case, indices, [logprobs for logprobs, _ in alone])
    second = _spread(case, indices, [logprobs for logprobs, _ in batch])
    noise = np.abs(first - second)[~np.isnan(first)]
    return ServerScores(
        first, (float(noise.mean()), float(noise.max())), alone[0][1], dtype, 2 * len(indices)
    )


def _spread(case: Case, indices: Sequence[int], scored: Sequence[list[float]]) -> Values:
    """Return the scores of the compared tokens, NaN for samples that were not scored."""
    values = np.full(case.tokens, np.nan)
    for at, logprobs in zip(indices, scored, strict=True):
        for group in case.groups:
            if group.sample == at:
                values[group.places] = logprobs[group.start : group.end]
    return values
