"""Distillation of distributions: a local teacher's, and a served one's likeliest tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from lockstep.client.turn import Scores
from lockstep.tokens import Sample
from lockstep.tokens.completion import Ranked
from lockstep.tokens.errors import BadRequest, BadSupport, ContractError
from lockstep.train.config import TrainConfig
from lockstep.train.learning.batch import Clock, TeacherTop, TrainBatch
from lockstep.train.learning.distributions import teacher_top
from lockstep.train.learning.item_logprobs import sampled_at
from lockstep.train.learning.learner import Learner
from lockstep.train.records.step_contents import (
    batch_digests,
    decode_teacher_tops,
    encode_groups,
)
from tests.train.rollouts import batch, directory, grouped, sampled

pytestmark = pytest.mark.exact_arithmetic
KINDS = ("forward_kl", "reverse_kl", "jsd")


def settings(kind: str, **teacher: Any) -> TrainConfig:
    return TrainConfig.of(
        {"loss": {"kind": kind}, "teacher": teacher, "learner": {"lr": 3e-4, "pass_tokens": 64}}
    )


def student(kind: str, **teacher: Any) -> Learner:
    """A learner with noise on its weights."""
    made = Learner(settings(kind, **teacher), exact=True)
    torch.manual_seed(0)
    with torch.no_grad():
        for own in made.model.parameters():
            if own.ndim > 1:
                own.add_(0.15 * own.std() * torch.randn_like(own))
    return made


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return sampled()


@pytest.fixture(scope="module")
def logprobs(samples: list[Sample]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The student's and the teacher's logprobs of the vocabulary at sampled tokens, in float64."""
    models = student("jsd", path="tiny").model, Learner(TrainConfig(), exact=True).model
    rows = []
    for own in samples:
        at = [at for at, was in enumerate(own.sampled_mask) if was]
        with torch.no_grad():
            both = [model(torch.tensor([own.token_ids])).logits[0].double() for model in models]
        first, second = (logits.log_softmax(-1)[[i - 1 for i in at]] for logits in both)
        rows.append((first, second))
    return rows


def by_hand(kind: str, s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    if kind == "forward_kl":
        return (t.exp() * (t - s)).sum(-1)
    if kind == "reverse_kl":
        return (s.exp() * (s - t)).sum(-1)
    m = (s.exp() / 2 + t.exp() / 2).log()
    return ((t.exp() * (t - m)).sum(-1) + (s.exp() * (s - m)).sum(-1)) / 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_local_teacher_is_compared_over_the_whole_vocabulary(
    samples: list[Sample], logprobs: list[tuple[torch.Tensor, torch.Tensor]], kind: str
) -> None:
    own = student(kind, path="tiny")
    made = batch(samples, settings(kind, path="tiny"))
    first = own.step(made, 1).metrics
    expected = torch.cat([by_hand(kind, s, t) for s, t in logprobs]).mean()
    assert first["loss"] == pytest.approx(float(expected), rel=1e-4)
    assert first["ref_kl"] == pytest.approx(float(expected), rel=1e-4)
    for step in range(2, 6):
        last = own.step(made, step).metrics
    assert last["loss"] < 0.8 * first["loss"]


def with_tops(
    made: TrainBatch, logprobs: list[tuple[torch.Tensor, torch.Tensor]], count: int
) -> TrainBatch:
    items = []
    for item, (_, teacher) in zip(made.items, logprobs, strict=True):
        best = teacher.topk(count)
        ids = np.zeros((len(item.sample.token_ids), count), dtype=np.int64)
        values = np.zeros(ids.shape, dtype=np.float32)
        at = sampled_at(item)
        ids[at], values[at] = best.indices.numpy(), best.values.numpy()
        items.append(replace(item, teacher_top=TeacherTop(ids, values)))
    return replace(made, items=tuple(items))


@pytest.mark.parametrize("kind", KINDS)
def test_a_served_teacher_is_compared_over_its_likeliest_tokens_and_all_others_together(
    samples: list[Sample], logprobs: list[tuple[torch.Tensor, torch.Tensor]], kind: str
) -> None:
    config = settings(kind, url="http://127.0.0.1:1", top_k=8)
    own = student(kind, url="http://127.0.0.1:1", top_k=8)
    made = with_tops(batch(samples, config), logprobs, 8)
    learnt = own.step(made, 1).metrics
    values = []
    for s, t in logprobs:
        ids = t.topk(8).indices
        sides = []
        for side in (s, t):
            kept = side.gather(-1, ids)
            rest = (1 - kept.exp().sum(-1, keepdim=True)).log()
            sides.append(torch.cat((kept, rest), -1))
        values.append(by_hand(kind, *sides))
    assert learnt["loss"] == pytest.approx(float(torch.cat(values).mean()), rel=1e-4)
    whole = float(torch.cat([by_hand(kind, s, t) for s, t in logprobs]).mean())
    assert learnt["loss"] <= whole * (1 + 1e-6)  # summed tokens hide differences, and add none
    assert learnt["teacher_bytes"] == 64 * sum(len(sample.token_ids) for sample in samples)


def test_the_likeliest_tokens_of_each_place_are_taken_in_order() -> None:
    ranked = (Ranked(7, -3.0), Ranked(4, -0.5), Ranked(9, -1.0))
    scores = Scores([1, 7, 4], [0.0, -3.0, -0.5], "v", 1.0, [(), ranked, ranked[1:]])
    top = teacher_top(scores, 2)
    assert top.ids.tolist() == [[0, 0], [4, 9], [4, 9]]
    assert top.logprobs.tolist() == [[0.0, 0.0], [-0.5, -1.0], [-0.5, -1.0]]
    with pytest.raises(ContractError, match=r"2 likeliest tokens at position 2, but teacher.top_k"):
        teacher_top(scores, 3)


def test_a_record_of_the_step_has_the_teachers_likeliest_tokens(
    samples: list[Sample], logprobs: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    plain = batch(samples, settings("jsd", path="tiny"))
    made = with_tops(plain, logprobs, 3)
    recorded = encode_groups(grouped(samples), made, Clock({"step-0": 0}), 1)
    tops = decode_teacher_tops(msgspec.json.decode(msgspec.json.encode(recorded)))
    assert tops is not None
    for item, top in zip(made.items, tops, strict=True):
        assert item.teacher_top is not None
        assert np.array_equal(top.ids, item.teacher_top.ids)
        assert np.array_equal(top.logprobs, item.teacher_top.logprobs)
    assert batch_digests(made, ())["teacher"] != batch_digests(plain, ())["teacher"]
    assert (
        decode_teacher_tops(encode_groups(grouped(samples), plain, Clock({"step-0": 0}), 1)) is None
    )


def test_truncated_tokens_and_other_vocabularies_are_rejected_by_name(tmp_path: Path) -> None:
    shaped = sampled(support=True, top_p=0.9)
    with pytest.raises(BadSupport, match=r"drawn with top_p 0\.9, but this loss compares"):
        student("jsd", path="tiny").step(batch(shaped), 1)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory("tiny"))
    model.resize_token_embeddings(600)
    model.save_pretrained(tmp_path)
    with pytest.raises(BadRequest, match="vocabulary has 600 tokens, but the student's has 512"):
        student("jsd", path=str(tmp_path))
    with pytest.raises(BadRequest, match=r"teacher\.path is 'absent': expected a bundled name"):
        student("jsd", path="absent")
