"""Passes of a step: what samples share is computed once, within bounds, and changes no logprob."""

from __future__ import annotations

import pytest
import torch

from lockstep.tokens import Sample
from lockstep.train.config import LearnerConfig, TrainConfig
from lockstep.train.learning.item_logprobs import MOST_COPIES, tree_passes
from lockstep.train.learning.learner import Learner
from tests.engine.rig import ids, sample_of
from tests.train.rollouts import batch, engine


def test_a_prompt_counts_once_in_the_tokens_of_a_pass() -> None:
    prompt = list(range(100))
    group = [[*prompt, 200 + at, *range(9)] for at in range(6)]
    assert tree_passes(group, 160) == [[0, 1, 2, 3, 4, 5]]
    assert tree_passes(group, 130) == [[0, 1, 2], [3, 4, 5]]
    assert tree_passes(group, 1) == [[0], [1], [2], [3], [4], [5]]


def test_relatives_are_in_one_pass_whatever_their_order() -> None:
    first, second = list(range(100)), list(range(300, 400))
    mixed = [[*first, 1], [*second, 1], [*first, 2], [*second, 2]]
    assert tree_passes(mixed, 110) == [[0, 2], [1, 3]]


def test_copies_of_keys_bound_a_pass_too() -> None:
    prompt = list(range(99))
    group = [[*prompt, 200 + at] for at in range(20)]
    passes = tree_passes(group, 200)
    assert [len(own) for own in passes] == [200 * MOST_COPIES // 100, 4]


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    rig, prompt = engine("tiny"), ids(1, 90)
    drawn = [sample_of(rig.generate(prompt, max_tokens=6, seed=seed)) for seed in range(6)]
    # A sub-agent that starts from the first answer.
    deeper = sample_of(rig.generate([*drawn[0].token_ids, *ids(2, 20)], max_tokens=6, seed=9))
    return [*drawn, deeper]


@pytest.mark.exact_arithmetic
def test_a_step_over_the_tree_is_the_step_of_separate_passes(samples: list[Sample]) -> None:
    computed, logprobs, gradients = [], [], []
    for pass_tokens in (8192, 1):
        config = TrainConfig(learner=LearnerConfig(pass_tokens=pass_tokens, max_grad_norm=1e9))
        learner, seen = Learner(config, exact=True), []
        learner.model.register_forward_pre_hook(
            lambda _, __, kwargs, seen=seen: seen.append(kwargs["input_ids"].numel()),
            with_kwargs=True,
        )
        learnt = learner.step(batch(samples, config), 1)
        assert learnt.metrics["unequal_logprobs"] == 0
        computed.append(sum(seen))
        logprobs.append(learnt.logprobs)
        gradients.append(torch.cat([p.grad.flatten() for p in learner.model.parameters()]))
    assert logprobs[0] == logprobs[1]
    assert computed[0] * 4 < computed[1]
    tree, separate = gradients
    assert float((tree - separate).norm() / separate.norm()) < 1e-5
