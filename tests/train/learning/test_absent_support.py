"""Truncated tokens of servers that record no sets: the sample says so, and is not learnt from."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from lockstep.protocol.common.response import Reading
from lockstep.protocol.dynamo.decode_chat import decode_dynamo
from lockstep.protocol.sglang.generate import decode_sglang
from lockstep.protocol.vllm.decode_generate import decode_generate
from lockstep.tokens import Completion, Sample
from lockstep.tokens.errors import BadSupport
from lockstep.train.config import LearnerConfig, TrainConfig
from lockstep.train.learning.batch import check_support
from tests.engine.rig import sample_of
from tests.protocol.responses import (
    dynamo_body,
    generate_body,
    generate_choice,
    reading,
    sglang_body,
)

pytestmark = pytest.mark.failure_mode("F100")
DECODERS: dict[str, Callable[[Reading], Completion]] = {
    "vllm": lambda context: decode_generate(generate_body(), context)[0],
    "sglang": lambda context: decode_sglang(sglang_body(), context),
    "dynamo": lambda context: decode_dynamo(dynamo_body(), context),
}


@pytest.mark.parametrize("server", DECODERS)
@pytest.mark.parametrize("options", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}], ids=str)
def test_a_sample_without_its_sets_says_so_and_is_an_error(
    server: str, options: dict[str, float]
) -> None:
    sample = sample_of(DECODERS[server](reading(sampling=options)))
    assert json.loads(sample.to_json())["support"] == "absent"
    assert Sample.from_json(sample.to_json()).support_absent
    with pytest.raises(BadSupport, match=rf"drawn with {next(iter(options))} .*support: absent"):
        check_support(sample, TrainConfig())
    check_support(sample, TrainConfig(learner=LearnerConfig(support="reselected")))


@pytest.mark.parametrize("server", DECODERS)
def test_a_sample_of_the_whole_distribution_needs_no_sets(server: str) -> None:
    sample = sample_of(DECODERS[server](reading()))
    assert not sample.support_absent
    check_support(sample, TrainConfig())


def test_sets_that_vllm_returns_are_taken() -> None:
    body = generate_body(generate_choice(sampling_mask=[[11, 40], [12]]))
    (completion,) = decode_generate(body, reading(sampling={"top_k": 5}))
    sample = sample_of(completion)
    assert not sample.support_absent
    check_support(sample, TrainConfig())
