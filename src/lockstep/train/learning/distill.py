"""On-policy distillation: a teacher scores what the student sampled, which moves towards it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.client.policy import Policy
from lockstep.tokens import Sample
from lockstep.tokens.errors import ContractError
from lockstep.train.config import LossConfig
from lockstep.train.failure import one_error
from lockstep.train.learning.loss import Masks, Ratio, masks, policy_loss


async def teacher_logprobs(
    teacher: Policy, samples: Sequence[Sample], *, temperature: float = 1.0, concurrency: int = 32
) -> list[list[float]]:
    """The teacher's logprob of every token of every sample; the first token of each has 0.0.

    Raises what `Policy.score` raises, and ContractError for scores of other tokens.
    """
    limit = asyncio.Semaphore(concurrency)

    async def one(sample: Sample) -> list[float]:
        async with limit:
            scores = await teacher.score(sample.token_ids, temperature=temperature)
        if scores.token_ids != sample.token_ids or len(scores.logprobs) != len(sample.token_ids):
            raise ContractError("the teacher scored other tokens than those of the sample")
        return scores.logprobs

    with one_error():
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(sample)) for sample in samples]
    return [task.result() for task in tasks]


def distill_loss(
    ratio: Ratio, trainer_BT: Tensor, teacher_BT: Tensor, learn_BT: Tensor, config: LossConfig
) -> tuple[Tensor, Masks, Tensor]:
    """The sum over tokens of a reverse-KL policy gradient, its masks, and its advantages.

    The advantage of a token is how much likelier the teacher finds it than the student does:
    under the student's own samples, its mean is minus the reverse KL.
    """
    advantage = (teacher_BT - trainer_BT).detach()
    masked = masks(ratio, advantage, config)
    return policy_loss(ratio, masked, advantage, learn_BT, config), masked, advantage


def reverse_kl(trainer_BT: Tensor, teacher_BT: Tensor) -> Tensor:
    """An estimate of KL(student || teacher) per token that is never negative (k3)."""
    log_q = (teacher_BT - trainer_BT).detach()
    return torch.exp(log_q) - log_q - 1.0
