"""On-policy distillation: a teacher scores the tokens that the student sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.client.policy import Policy
from lockstep.client.turn import Scores
from lockstep.tokens import Sample
from lockstep.tokens.errors import ContractError
from lockstep.train.failure import one_error


async def teacher_scores(
    teacher: Policy,
    samples: Sequence[Sample],
    temperature: float = 1.0,
    *,
    top: int = 0,
    concurrency: int = 32,
) -> list[Scores]:
    """Return the teacher's scores of every sample, with the `top` likeliest tokens.

    Raises what `Policy.score` raises, and ContractError when the teacher scored other tokens.
    """
    limit = asyncio.Semaphore(concurrency)

    async def score(sample: Sample) -> Scores:
        async with limit:
            scores = await teacher.score(sample.token_ids, temperature=temperature, top=top)
        if scores.token_ids != sample.token_ids or len(scores.logprobs) != len(sample.token_ids):
            raise ContractError("the teacher scored other tokens than those of the sample")
        return scores

    with one_error():
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(score(sample)) for sample in samples]
    return [task.result() for task in tasks]


def teacher_advantages(trainer_N: Tensor, teacher_N: Tensor) -> Tensor:
    """Return how much likelier the teacher finds each token than the student does, in nats.

    Over the student's own samples the mean is minus the reverse KL, so that a policy gradient with
    these advantages moves the student towards the teacher.
    """
    return (teacher_N - trainer_N).detach()


def reverse_kl(trainer_N: Tensor, teacher_N: Tensor) -> Tensor:
    """Return an estimate of KL(student || teacher) per token that is never negative (k3)."""
    log_q = (teacher_N - trainer_N).detach()
    return torch.exp(log_q) - log_q - 1.0
