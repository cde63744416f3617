"""Protobuf messages: the bytes that the SDK sends and reads, and broken messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.integrations.tinker.protocol.protobuf_messages import (
    ForwardBackwardRequest,
    encode_forward_backward,
    encode_samples,
    identity,
)
from lockstep.tokens import Completion, PromptLogprob, VersionSpan
from lockstep.tokens.completion import Finish, Ranked
from lockstep.tokens.errors import BadRequest

VECTORS = json.loads((Path(__file__).parents[3] / "data/tinker/golden_protobuf.json").read_bytes())
REQUESTS = {each["name"]: bytes.fromhex(each["hex"]) for each in VECTORS["requests"]}
RESPONSES = {each["name"]: bytes.fromhex(each["hex"]) for each in VECTORS["responses"]}


def inputs(name: str) -> dict[str, Any]:
    (datum,) = ForwardBackwardRequest.decode(REQUESTS[name]).data
    return {key: tensor.array(key).tolist() for key, tensor in datum.inputs.items()}


def completion(ids: list[int], logprobs: list[float], finish: Finish, **more: Any) -> Completion:
    return Completion(
        token_ids=ids,
        logprobs=logprobs,
        prompt_ids=[1, 2, 3],
        finish=finish,
        versions=(VersionSpan("v", 0, len(ids)),),
        **more,
    )


def test_a_request_of_the_sdk_is_decoded() -> None:
    request = ForwardBackwardRequest.decode(REQUESTS["cross_entropy"])
    assert (request.model_id, request.seq_id, request.loss_fn) == ("s1:train:0", 1, "cross_entropy")
    assert request.data[0].tokens == (5, 6, 7)
    assert not request.forward_only
    assert inputs("cross_entropy") == {"target_tokens": [6, 7, 8], "weights": [0.0, 1.0, 1.0]}
    assert ForwardBackwardRequest.decode(REQUESTS["forward_only"]).forward_only
    assert inputs("importance_sampling") == {
        "target_tokens": [6, 7, 8],
        "logprobs": [0.0, -1.0, -1.5],
        "advantages": [0.0, 1.0, -1.0],
    }


def test_numbers_and_texts_of_a_loss_are_read() -> None:
    request = ForwardBackwardRequest.decode(REQUESTS["ppo_config_numbers_and_text"])
    assert request.config == {"clip_low_threshold": 0.8, "mode": "x"}


def test_sparse_targets_become_dense() -> None:
    values = inputs("sparse_csr_targets")
    targets, weights = np.zeros((7, 6), int), np.zeros((7, 6))
    targets[2, 1], targets[5, 0], weights[2, 1], weights[5, 0] = 9, 3, 1.0, 0.5
    assert values == {"target_tokens": targets.tolist(), "weights": weights.tolist()}


def test_results_are_the_bytes_that_the_sdk_reads() -> None:
    logprobs = [np.array([-0.5, -1.5], np.float32), np.array([-2.0], np.float32)]
    written = encode_forward_backward(logprobs, {"loss:sum": 4.0})
    assert written == RESPONSES["ForwardBackwardOutput, 2 datums of 2 and 1 tokens"]
    prompt = [
        None,
        PromptLogprob(2, -1.25, top=(Ranked(7, -0.5), Ranked(9, -1.0))),
        PromptLogprob(3, -0.75, top=(Ranked(7, -0.25),)),
    ]
    samples = [
        completion([16, 505], [-0.25, -0.5], "stop", prompt_logprobs=prompt),
        completion([17], [-1.0], "length"),
    ]
    vector = RESPONSES["SampleResponse with prompt and top-k prompt logprobs"]
    written = encode_samples(samples, prompt_logprobs=True, prompt_k=2)
    assert written + b"\x20\x02" == vector  # field 4 of the vector counts 2 cached tokens


def test_last_n_scores_only_the_last_prompt_tokens() -> None:
    prompt = [None, PromptLogprob(2, -1.0), PromptLogprob(3, -2.0)]
    sample = completion([4], [-1.0], "length", prompt_logprobs=prompt)
    raw = encode_samples([sample], prompt_logprobs=True, last_n=1)
    values = np.frombuffer(raw[-12:], "<f4")
    assert np.isnan(values[:2]).all()
    assert values[2] == -2.0


@pytest.mark.parametrize("cut", [1, 7, 20, 40, 60, 100])
def test_a_truncated_message_is_rejected(cut: int) -> None:
    with pytest.raises(BadRequest, match="the body is not a"):
        ForwardBackwardRequest.decode(REQUESTS["cross_entropy"][:-cut])


def test_model_id_and_seq_id_of_a_broken_request_are_still_found() -> None:
    raw = REQUESTS["cross_entropy"]
    assert identity(raw[:-3]) == ("s1:train:0", 1)
    assert identity(raw) == ("s1:train:0", 1)
    assert identity(b"\xff") is None
