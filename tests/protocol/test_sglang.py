"""SGLang's responses: ids and logprobs from meta_info, under the same contract."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest

from lockstep.protocol.sglang.generate import (
    SglangStreamDecoder,
    decode_sglang,
    encode_sglang,
    rid_of,
)
from lockstep.tokens.errors import (
    BadExperts,
    BadLogprob,
    BadRequest,
    Misaligned,
    MissingFinish,
    MissingTokenIds,
)
from tests.protocol.responses import IDS, LOGPROBS, reading, sglang_body

INT32 = base64.b64encode(np.arange(16, dtype="<i4").tobytes()).decode()


def test_ids_logprobs_version_and_stop_come_from_meta_info() -> None:
    completion = decode_sglang(sglang_body(), reading())
    assert (completion.token_ids, completion.logprobs) == (IDS, LOGPROBS)
    assert (completion.finish, completion.stop_token) == ("stop", 12)
    assert completion.versions[0].version == "v1"


def test_a_trimmed_stop_token_is_still_a_sampled_one() -> None:
    assert decode_sglang(sglang_body(output_ids=[11]), reading()).token_ids == IDS


@pytest.mark.parametrize(("changes", "error"), [
    ({"output_token_logprobs": [[-0.5, 11, None], None]}, BadLogprob),
    ({"output_token_logprobs": [[-0.5, 11, None], [None, 12, None]]}, BadLogprob),
    ({"output_token_logprobs": [[-0.5, 11, None], [-9999.0, 12, None]]}, BadLogprob),
    ({"output_token_logprobs": None}, BadLogprob),
    ({"output_token_logprobs": None, "output_ids": None}, MissingTokenIds),
    ({"output_token_logprobs": [[-0.5, 11, None]]}, Misaligned),
    ({"output_ids": [11, 13]}, Misaligned),
    ({"finish_reason": None}, MissingFinish),
    ({"finish_reason": {"type": "abort", "message": "too long", "status_code": 400}}, BadRequest),
])  # fmt: skip
def test_a_broken_answer_is_refused(changes: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        decode_sglang(sglang_body(**changes), reading())


def test_an_abort_keeps_its_tokens() -> None:
    completion = decode_sglang(sglang_body(finish_reason={"type": "abort"}), reading())
    assert (completion.finish, completion.token_ids) == ("abort", IDS)


def test_prompt_logprobs_name_the_prompt() -> None:
    context = reading(sampling={"prompt_logprobs": 1})
    entries = [[None, 5, None], [-1.0, 6, None], [-2.0, 7, None]]
    tops = [None, [[-0.1, 9, None]], [[-0.2, 7, None]]]
    body = sglang_body(input_token_logprobs=entries, input_top_logprobs=tops)
    first, second, third = decode_sglang(body, context).prompt_logprobs or []
    assert first is None
    assert (second.token_id, second.logprob, second.top[0].token_id) == (6, -1.0, 9)
    assert third.logprob == -2.0
    with pytest.raises(Misaligned, match="position 1"):
        decode_sglang(
            sglang_body(input_token_logprobs=[entries[0], entries[2], entries[1]]), context
        )


@pytest.mark.failure_mode("F38")
def test_bare_experts_get_the_layout_of_the_model() -> None:
    body = sglang_body(routed_experts=INT32)
    completion = decode_sglang(body, reading(experts_start=2), (2, 2))
    assert completion.experts is not None
    assert (completion.experts.shape, completion.experts.start) == ((2, 2, 2), 2)
    assert completion.experts.numpy().flatten().tolist() == list(range(8, 16))
    with pytest.raises(BadExperts):
        decode_sglang(body, reading(experts_start=0), (3, 1))


def test_cumulative_events_end_in_the_whole_answer() -> None:
    stream = SglangStreamDecoder(reading())
    one = sglang_body(
        finish_reason=None, completion_tokens=1, output_ids=[11],
        output_token_logprobs=[[-0.5, 11, None]],
    )  # fmt: skip
    deltas = stream.feed(one) + stream.feed(sglang_body())
    assert [delta.token_ids for delta in deltas] == [[11], [12]]
    assert stream.finish() == [decode_sglang(sglang_body(), reading())]
    with pytest.raises(Misaligned, match="cumulative"):
        stream.feed(one)


@pytest.mark.failure_mode("F100")
def test_supports_bring_the_logprobs_that_belong_to_them() -> None:
    """The other logprobs are those of the whole vocabulary."""
    masks, own = [[11, 40], [12]], [-0.125, 0.0]
    body = sglang_body(output_token_sampling_mask=masks, output_token_sampling_logprobs=own)
    completion = decode_sglang(body, reading(sampling={"top_k": 5}))
    assert completion.support is not None
    assert completion.support.lists() == masks
    assert (completion.logprobs, completion.logprob_mode) == (own, "processed")


@pytest.mark.failure_mode("F16")
@pytest.mark.failure_mode("F100")
def test_alternatives_are_normalised_over_the_set_they_could_have_been_drawn_from() -> None:
    """SGLang's are over the whole vocabulary, and its sets are not sorted."""
    tops = [[[-0.5, 11, None], [-0.75, 40, None], [-1.0, 7, None]], [[-0.25, 12, None]]]
    body = sglang_body(
        output_top_logprobs=tops,
        output_token_sampling_mask=[[40, 11], [12]],
        output_token_sampling_logprobs=[-0.25, 0.0],
    )
    completion = decode_sglang(body, reading(sampling={"top_k": 5, "logprobs": 3}))
    assert completion.support is not None
    assert completion.support.lists() == [[11, 40], [12]]
    listed = [[(one.token_id, one.logprob) for one in top] for top in completion.top_logprobs or ()]
    assert listed == [[(11, -0.25), (40, -0.5)], [(12, 0.0)]]


def test_spans_of_versions_are_the_server_s() -> None:
    spans = [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 1, "end": 2}]
    completion = decode_sglang(sglang_body(weight_versions=spans), reading())
    assert [(span.version, span.start, span.end) for span in completion.versions] == [
        ("a", 0, 1),
        ("b", 1, 2),
    ]


def test_the_last_id_of_the_vocabulary_may_be_named_0_in_prompt_logprobs() -> None:
    context = reading(sampling={"prompt_logprobs": 0})
    body = sglang_body(input_token_logprobs=[[None, 5, None], [-1.0, 6, None], [-2.0, 0, None]])
    completion = decode_sglang(body, context, last_id=7)
    assert [entry and entry.logprob for entry in completion.prompt_logprobs or ()] == [
        None,
        -1.0,
        -2.0,
    ]
    with pytest.raises(Misaligned, match="names token 0, but the id there is 7"):
        decode_sglang(body, context, last_id=511)


@pytest.mark.failure_mode("F45")
def test_no_id_that_is_sent_is_the_beginning_of_another() -> None:
    names = ["r1", "r10", "1", "11", "2:r1", "", "12345678901"]
    sent = [rid_of(name) for name in names]
    assert not [(a, b) for a in sent for b in sent if a != b and b.startswith(a)]


@pytest.mark.failure_mode("F100")
@pytest.mark.parametrize(
    ("options", "requested"),
    [
        ({"top_k": 5, "top_p": 0.9}, True),
        ({"top_p": 0.9}, None),
        ({"top_k": 5000}, None),
        ({}, None),
    ],
)
def test_supports_are_requested_where_sglang_has_them(
    options: dict[str, Any], requested: bool | None
) -> None:
    request = reading(sampling=options).request
    body = json.loads(encode_sglang(request, mode="processed", max_new_tokens=4, adapter=None))
    assert body.get("return_sampling_mask") is requested
