"""Every recorded response of a real server becomes completions, or the right error."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lockstep.http.sse import EventReader
from lockstep.protocol.common.decode_error import error_of
from lockstep.protocol.common.response import Reading
from lockstep.protocol.dynamo.decode_chat import DynamoStreamDecoder, decode_dynamo
from lockstep.protocol.vllm.decode_generate import GenerateStreamDecoder, decode_generate
from lockstep.tokens import Completion, errors
from lockstep.tokens.errors import LockstepError
from tests.data.captures import WIRE, Capture, load, names

GENERATE, CHAT = "/inference/v1/generate", "/v1/chat/completions"
COMPLETE: dict[tuple[str, str], list[tuple[int, str]]] = {
    ("vllm", "gen_allowed_token_ids"): [(3, "length")],
    ("vllm", "gen_greedy_logprobs1"): [(3, "length")],
    ("vllm", "gen_logprobs0"): [(2, "length")],
    ("vllm", "gen_logprobs3_sampled"): [(2, "length")],
    ("vllm", "gen_n2"): [(2, "length"), (2, "length")],
    ("vllm", "gen_stream"): [(4, "length")],
    ("vllm", "lora_ad_v1"): [(6, "length")],
    ("vllm", "rl_probe_A"): [(6, "length")],
    ("dynamo", "gen_inference_v1"): [(4, "length")],
    ("dynamo", "gen_inference_v1_plp"): [(2, "length")],
    ("dynamo", "chat_stream"): [(3, "length")],
    ("dynamo", "chat_td_all"): [(4, "length")],
    ("dynamo", "chat_td_engine_data"): [(4, "length")],
    ("dynamo", "more_eos_mid"): [(2, "stop")],
    ("dynamo", "more_eos_mid_ignore"): [(5, "length")],
    ("dynamo", "more_stop_string"): [(3, "stop")],
    ("dynamo", "more_stop_string_include"): [(3, "stop")],
    ("dynamo", "sample_chat"): [(4, "length")],
    ("dynamo", "special_eos_out"): [(4, "stop")],
    ("dynamo", "special_eos_out_keep"): [(4, "stop")],
    ("dynamo", "special_onechunk"): [(4, "length")],
    ("dynamo", "special_oov"): [(3, "length")],
    ("dynamo", "special_partial_utf8"): [(2, "length")],
    ("dynamo", "special_precision"): [(1, "length")],
}
REFUSED: dict[tuple[str, str], type[LockstepError]] = {
    ("vllm", "gen_err_at_limit"): errors.PromptTooLong,
    ("vllm", "gen_err_overlong"): errors.PromptTooLong,
    ("vllm", "gen_err_huge_id"): errors.BadTokenId,
    ("vllm", "gen_err_neg_id"): errors.BadTokenId,
    ("vllm", "gen_err_oov_id"): errors.BadTokenId,
    ("vllm", "gen_err_stream_oov"): errors.BadTokenId,
    ("vllm", "gen_err_unknown_model"): errors.UnknownModel,
    ("vllm", "lora_unknown"): errors.UnknownModel,
    ("vllm", "gen_err_get"): errors.NotFound,
    ("vllm", "gen_text_mode"): errors.Misaligned,
    ("vllm", "rl_probe_after_bad_reload"): errors.EngineFailure,
    ("dynamo", "gen_inference_v1_noneligible"): errors.UnknownModel,
    ("dynamo", "gen_inference_v1_stream"): errors.UnsupportedField,
    ("dynamo", "more_inference_v1_generate"): errors.UnknownModel,
    ("dynamo", "route_inference_v1_generate"): errors.NotFound,
    ("dynamo", "chat_bad_model"): errors.UnknownModel,
    ("dynamo", "chat_n2"): errors.ContractError,
    ("dynamo", "chat_n2_engine_data"): errors.ContractError,
    ("dynamo", "more_prompt_ids_from_messages"): errors.Misaligned,
    ("dynamo", "lifecycle_kill9_0"): errors.Unavailable,
    ("dynamo", "lifecycle_kill9_stream"): errors.Unavailable,
    ("dynamo", "special_int_keys"): errors.EngineFailure,
    ("dynamo", "special_misaligned_logprobs"): errors.Misaligned,
    ("dynamo", "special_no_finish"): errors.MissingFinish,
    ("dynamo", "special_nonfinite"): errors.BadLogprob,
    ("dynamo", "worker_exception"): errors.EngineFailure,
    ("dynamo", "worker_soft_error"): errors.EngineFailure,
}


def expected_error(server: str, capture: Capture) -> type[LockstepError]:
    """What is not listed above was requested without logprobs or ids, or refused with a 400."""
    listed = REFUSED.get((server, capture.name))
    if listed is not None:
        return listed
    if capture.status == 400:
        return errors.BadRequest
    has_ids = "completion_token_ids" in str(capture.sent) or capture.path == GENERATE
    return errors.BadLogprob if has_ids else errors.MissingTokenIds


def read(capture: Capture) -> list[Completion]:
    reading = Reading(capture.request())
    if capture.status != 200:
        raise error_of(capture.status, capture.body)
    if capture.streamed:
        kind = GenerateStreamDecoder if capture.path == GENERATE else DynamoStreamDecoder
        stream = kind(reading)
        for event in EventReader().feed(capture.body):
            stream.feed(event)
        return stream.finish()
    if capture.path == GENERATE:
        return decode_generate(capture.body, reading)
    return [decode_dynamo(capture.body, reading)]


EVERY = [
    (server, name)
    for server, path in (("vllm", GENERATE), ("dynamo", GENERATE), ("dynamo", CHAT))
    for name in names(server, path)
]


@pytest.mark.parametrize(("server", "name"), EVERY)
def test_a_recorded_response_is_read_or_refused_for_its_reason(server: str, name: str) -> None:
    capture = load(server, name)
    if (shape := COMPLETE.get((server, name))) is not None:
        completions = read(capture)
        assert [
            (len(completion.token_ids), completion.finish) for completion in completions
        ] == shape
        assert [completion.index for completion in completions] == list(range(len(shape)))
        return
    with pytest.raises(LockstepError) as caught:
        read(capture)
    assert type(caught.value) is expected_error(server, capture)


def test_vllm_numbers_are_kept_to_the_last_bit() -> None:
    capture = load("vllm", "gen_greedy_logprobs1")
    choice = json.loads(capture.body)["choices"][0]
    (completion,) = read(capture)
    assert completion.token_ids == choice["token_ids"]
    assert completion.logprobs == [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert completion.ranks == [1, 1, 1]
    assert [(span.version, span.start, span.end) for span in completion.versions] == [
        ("default", 0, 3)
    ]


def test_alternatives_are_the_most_likely_and_the_sampled_one_only_by_rank() -> None:
    (completion,) = read(load("vllm", "gen_logprobs3_sampled"))
    assert completion.top_logprobs is not None
    assert [[one.rank for one in top] for top in completion.top_logprobs] == [[1, 2], [1, 2]]
    assert completion.token_ids[0] not in [one.token_id for one in completion.top_logprobs[0]]


def test_engine_data_wins_over_the_float32_echo_of_the_frontend() -> None:
    (completion,) = read(load("dynamo", "special_precision"))
    assert completion.logprobs == [-0.12345678901234566]
    assert completion.prompt_logprobs is not None
    assert completion.prompt_logprobs[1].logprob == -0.12345678901234566


@pytest.mark.failure_mode("F12")
@pytest.mark.parametrize("name", ["abort_all", "pause_abort"])
def test_an_abort_keeps_its_partial_tokens_and_says_so(name: str) -> None:
    for exchange in json.loads((WIRE / "vllm" / f"{name}.json").read_text()):
        body = json.dumps(exchange["response"]).encode()
        request = load("vllm", "gen_greedy_logprobs1").request()
        count = len(exchange["response"]["choices"])
        request = replace(request, sampling=replace(request.sampling, n=count))
        for completion in decode_generate(body, Reading(request)):
            assert completion.finish == "abort"
            assert not completion.complete
            assert len(completion.token_ids) == len(completion.logprobs) > 0


def test_experts_in_engine_data_belong_to_the_completion() -> None:
    (completion,) = read(load("dynamo", "chat_td_engine_data"))
    assert completion.experts is not None
    assert completion.experts.shape == (12, 2, 2)
    assert completion.experts.numpy()[0].tolist() == [[0, 1], [2, 3]]
