"""Distributions of the teacher and the student at sampled tokens, for losses that compare them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.client.turn import Scores
from lockstep.engine.forward_pass import Ints
from lockstep.tokens.errors import BadRequest, BadSupport, ContractError
from lockstep.train.learning.batch import TeacherTop, TrainItem
from lockstep.train.learning.item_logprobs import ItemLogprobs


@dataclass(frozen=True, slots=True)
class LocalTeacher:
    """A teacher that the trainer loads itself. It gives logprobs of the whole vocabulary."""

    scorer: ItemLogprobs

    @classmethod
    def check_vocabulary(cls, teacher: Any, student: Any, path: str) -> None:
        """Raise BadRequest unless both models have one vocabulary size."""
        sizes = [own.config.get_text_config().vocab_size for own in (teacher, student)]
        if sizes[0] != sizes[1]:
            raise BadRequest(
                f"teacher.path is {path!r}, whose vocabulary has {sizes[0]} tokens, but the "
                f"student's has {sizes[1]}: distributions need one vocabulary",
                param="teacher.path",
            )


def distributions(
    student_NV: Tensor,
    items: Sequence[TrainItem],
    positions: Sequence[Ints],
    teacher: LocalTeacher | None,
) -> tuple[Tensor, Tensor]:
    """Return the distributions of the student and the teacher at `positions`, as logprobs.

    With a local teacher they are those of the vocabulary (N, V). Else they are (N, K + 1): the K
    likeliest tokens of the teacher that the items carry, and all others together. Raises BadSupport
    for tokens that were drawn from a part of the vocabulary.
    """
    for item in items:
        if any(span.shaping.restricts for span in item.sample.shaping):
            raise BadSupport(
                f"tokens were drawn with {item.sample.shaping[0].shaping.changes}, but this loss "
                "compares distributions of the whole vocabulary: sample without these options, or "
                'set loss.kind to "distill"'
            )
    if teacher is not None:
        with torch.no_grad():
            return student_NV, teacher.scorer.score_whole(items, positions)[2].detach()
    pairs = [(item.teacher_top, at) for item, at in zip(items, positions, strict=True)]
    tops = [(own.ids[at], own.logprobs[at]) for own, at in pairs if own is not None]
    ids_NK = torch.from_numpy(np.concatenate([ids for ids, _ in tops])).to(student_NV.device)
    teacher_NK = torch.from_numpy(np.concatenate([own for _, own in tops])).double()
    vocab = student_NV.shape[-1]
    if int(ids_NK.max()) >= vocab:
        raise BadRequest(
            f"the teacher's likeliest tokens contain id {int(ids_NK.max())}, but the student's "
            f"vocabulary has {vocab} tokens: distributions need one vocabulary",
            param="teacher.url",
        )
    chosen_NK = student_NV.gather(-1, ids_NK)
    others_N = student_NV.scatter(-1, ids_NK, -torch.inf).logsumexp(-1, keepdim=True)
    student = torch.cat((chosen_NK, others_N), -1).double()
    teacher_NK = teacher_NK.to(student.device)
    # The teacher's logprobs are rounded, so that their sum may exceed 1.
    rest_N = (1 - teacher_NK.exp().sum(-1, keepdim=True)).clamp(min=SMALLEST_REST).log()
    return student, torch.cat((teacher_NK, rest_N), -1)


SMALLEST_REST = 1e-7
"""Least probability of the tokens that the teacher did not list: that of rounding in float32."""


def teacher_top(scores: Scores, count: int) -> TeacherTop:
    """Return the `count` likeliest tokens before each token. Raises ContractError if there are
    fewer.
    """
    ids: npt.NDArray[np.int64] = np.zeros((len(scores.token_ids), count), dtype=np.int64)
    logprobs = np.zeros(ids.shape, dtype=np.float32)
    for at, ranked in enumerate(scores.top or ()):
        if at == 0:
            continue
        logprob_of = {own.token_id: own.logprob for own in ranked}
        best = sorted(logprob_of.items(), key=lambda pair: -pair[1])
        if len(best) < count:
            raise ContractError(
                f"the teacher returned {len(best)} likeliest tokens at position {at}, but "
                f"teacher.top_k is {count}"
            )
        ids[at], logprobs[at] = zip(*best[:count], strict=True)
    return TeacherTop(ids, logprobs)
