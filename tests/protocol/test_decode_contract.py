"""A response that breaks the token contract is an error that names the place; never a repair."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from lockstep.protocol.common.prompt_logprobs import (
    decode_prompt_logprobs,
    encode_prompt_logprobs,
)
from lockstep.protocol.common.response import Reading
from lockstep.protocol.dynamo.decode_chat import DynamoStreamDecoder, decode_dynamo
from lockstep.protocol.vllm.decode_generate import GenerateStreamDecoder, decode_generate
from lockstep.protocol.vllm.generate_request import Form
from lockstep.protocol.vllm.generate_response import generate_response
from lockstep.tokens import Completion, PromptLogprob, Ranked, RoutedExperts
from lockstep.tokens.completion import usable
from lockstep.tokens.errors import (
    BadExperts,
    BadLogprob,
    BadVersions,
    ContractError,
    EngineFailure,
    Misaligned,
    MissingFinish,
    MissingTokenIds,
    UnsupportedField,
)
from tests.protocol.responses import (
    IDS,
    LOGPROBS,
    PROMPT,
    dynamo_body,
    entry,
    expert_rows,
    experts_npy,
    experts_object,
    generate_body,
    generate_choice,
    reading,
)

FORMS = ["vllm", "prime"]


def content(*entries: Any) -> dict[str, Any]:
    return {"logprobs": {"content": list(entries)}}


@pytest.mark.parametrize("form", FORMS)
def test_both_spellings_of_a_token_are_read_alike(form: str) -> None:
    (completion,) = decode_generate(generate_body(generate_choice(form=form)), reading())
    assert (completion.token_ids, completion.logprobs) == (IDS, LOGPROBS)


@pytest.mark.failure_mode("F05")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("hole", [None, {"token_id": 12, "token": "token_id:12"}])
def test_a_hole_among_the_logprobs_is_an_error_with_its_position(form: str, hole: Any) -> None:
    bad = generate_choice(**content(entry(11, -0.5, form=form), hole))
    with pytest.raises(BadLogprob, match="position 1"):
        decode_generate(generate_body(bad), reading())


@pytest.mark.failure_mode("F05")
def test_a_null_in_engine_data_is_an_error_with_its_position() -> None:
    with pytest.raises(BadLogprob, match="position 1"):
        decode_dynamo(dynamo_body({"completion_logprobs": [-0.5, None]}), reading())


def test_scores_at_a_temperature_are_taken_only_from_an_engine_that_says_it_applied_it() -> None:
    """dynamo.vllm's prompt logprobs are raw whatever the temperature, and it does not say so."""
    sampling = {"temperature": 0.5, "prompt_logprobs": 0, "logprob_mode": "processed"}
    with pytest.raises(UnsupportedField, match="raw whatever its mode"):
        decode_dynamo(dynamo_body(), reading(sampling=sampling))
    prompt = [None, {"6": {"logprob": -1.0}}, {"7": {"logprob": -2.0}}]
    scored = {"temperature": 0.5, "logprob_mode": "processed", "prompt_logprobs": prompt}
    assert decode_dynamo(dynamo_body(scored), reading(sampling=sampling))


@pytest.mark.failure_mode("F06")
def test_ids_and_logprobs_of_different_length_are_an_error() -> None:
    with pytest.raises(Misaligned, match="2 token ids but 1"):
        decode_generate(generate_body(generate_choice(**content(entry(11, -1.0)))), reading())
    with pytest.raises(Misaligned, match="2 token ids but 1"):
        decode_dynamo(dynamo_body({"completion_logprobs": [-0.5]}), reading())


@pytest.mark.failure_mode("F07")
@pytest.mark.parametrize("form", FORMS)
def test_a_logprob_of_another_token_is_an_error_with_its_position(form: str) -> None:
    bad = content(entry(11, -0.5, form=form), entry(13, -0.25, form=form))
    with pytest.raises(Misaligned, match=r"position 1 .*13.* 12"):
        decode_generate(generate_body(generate_choice(**bad)), reading())


@pytest.mark.failure_mode("F07")
@pytest.mark.parametrize("names", [["token_id:11\ntoken_id:12", ""], ["11", "12"], ["a", "b"]])
def test_names_that_only_look_right_when_glued_together_are_refused(names: list[str]) -> None:
    entries = [{"token": name, "logprob": -1.0} for name in names]
    with pytest.raises(Misaligned, match="position 0"):
        decode_generate(generate_body(generate_choice(**content(*entries))), reading())


@pytest.mark.failure_mode("F07")
def test_a_chat_echo_that_names_other_ids_than_the_engine_is_an_error() -> None:
    echo = {"content": [entry(11, -0.5), entry(13, -0.25)]}
    with pytest.raises(Misaligned, match="position 1"):
        decode_dynamo(dynamo_body(logprobs=echo), reading())


@pytest.mark.failure_mode("F08")
def test_absent_ids_are_an_error() -> None:
    with pytest.raises(MissingTokenIds):
        decode_generate(generate_body(generate_choice(token_ids=None)), reading())
    with pytest.raises(MissingTokenIds):
        decode_dynamo(dynamo_body({"completion_token_ids": None}), reading())


@pytest.mark.failure_mode("F09")
def test_present_but_empty_ids_are_a_completion_of_no_tokens() -> None:
    empty = generate_choice(token_ids=[], logprobs=None, weight_versions=None)
    (completion,) = decode_generate(generate_body(empty), reading())
    assert (completion.token_ids, completion.logprobs, completion.versions) == ([], [], ())
    engine = {"completion_token_ids": [], "completion_logprobs": []}
    chat = decode_dynamo(dynamo_body(engine, nvext={"completion_token_ids": [1]}), reading())
    assert chat.token_ids == []


@pytest.mark.failure_mode("F11")
def test_choices_are_matched_by_index_and_all_must_be_there() -> None:
    second = generate_choice(1, token_ids=[12, 11], **content(entry(12, -1.0), entry(11, -2.0)))
    body = generate_body(second, generate_choice(0))
    completion = decode_generate(body, reading(sampling={"n": 2}))
    assert [one.token_ids for one in completion] == [[11, 12], [12, 11]]
    assert [one.logprobs for one in completion] == [LOGPROBS, [-1.0, -2.0]]
    for choices in ([generate_choice(0)], [generate_choice(0), generate_choice(0)]):
        with pytest.raises(ContractError, match="2 choices"):
            decode_generate(generate_body(*choices), reading(sampling={"n": 2}))


@pytest.mark.failure_mode("F12")
def test_abort_is_not_stop_even_where_dynamo_calls_it_stop() -> None:
    stops = reading(sampling={"stop_token_ids": (12,)})
    assert decode_dynamo(dynamo_body(), stops).finish == "stop"
    assert decode_dynamo(dynamo_body(), stops).stop_token == 12
    others = reading(sampling={"stop_token_ids": (99,)})
    assert decode_dynamo(dynamo_body(), others).finish == "abort"
    assert decode_dynamo(dynamo_body({"finish_reason": "abort"}), stops).finish == "abort"
    assert decode_dynamo(dynamo_body({"finish_reason": "stop"}), others).finish == "stop"


@pytest.mark.failure_mode("F13")
@pytest.mark.parametrize("reason", [None, "", "content_filter"])
def test_an_answer_without_a_known_finish_is_an_error(reason: str | None) -> None:
    with pytest.raises(MissingFinish):
        decode_generate(generate_body(generate_choice(finish_reason=reason)), reading())
    with pytest.raises(MissingFinish):
        decode_dynamo(dynamo_body(finish_reason=reason), reading())


@pytest.mark.failure_mode("F13")
@pytest.mark.parametrize("kind", [GenerateStreamDecoder, DynamoStreamDecoder])
def test_a_stream_that_ends_early_is_an_error(kind: Any) -> None:
    with pytest.raises(MissingFinish):
        kind(reading()).finish()


def test_an_engine_that_says_error_has_failed() -> None:
    with pytest.raises(EngineFailure):
        decode_generate(generate_body(generate_choice(finish_reason="error")), reading())


@pytest.mark.failure_mode("F15")
@pytest.mark.parametrize("value", ["NaN", "-Infinity", "-9999.0"])
def test_a_logprob_that_is_no_number_is_refused_or_kept_on_request(value: str) -> None:
    bad = generate_body().replace(b"-0.25", value.encode())
    with pytest.raises(BadLogprob, match="position 1"):
        decode_generate(bad, reading())
    (kept,) = decode_generate(bad, reading(allow_nonfinite=True))
    assert [usable(value) for value in kept.logprobs] == [True, False]


@pytest.mark.failure_mode("F15")
def test_a_null_can_be_kept_as_nan_on_request() -> None:
    bad = generate_body().replace(b"-0.25", b"null")
    (kept,) = decode_generate(bad, reading(allow_nonfinite=True))
    assert [usable(value) for value in kept.logprobs] == [True, False]


@pytest.mark.failure_mode("F16")
def test_mode_and_temperature_are_on_the_completion() -> None:
    body = generate_body(logprob_mode="processed", temperature=0.7)
    (completion,) = decode_generate(body, reading(sampling={"temperature": 0.5}))
    assert (completion.logprob_mode, completion.temperature) == ("processed", 0.7)
    (completion,) = decode_generate(generate_body(), reading(sampling={"temperature": 0.5}))
    assert (completion.logprob_mode, completion.temperature) == ("raw", 0.5)
    with pytest.raises(ContractError, match="'raw' logprobs were requested"):
        decode_generate(body, reading(sampling={"logprob_mode": "raw"}))


def test_versions_must_cover_the_tokens() -> None:
    short = generate_choice(weight_versions=[{"version": "v1", "start": 0, "end": 1}])
    with pytest.raises(BadVersions):
        decode_generate(generate_body(short), reading())


def test_a_server_that_used_another_prompt_is_caught() -> None:
    with pytest.raises(Misaligned, match="position 2"):
        decode_generate(generate_body(prompt_token_ids=[5, 6, 8]), reading())
    with pytest.raises(Misaligned, match="position 2"):
        decode_dynamo(dynamo_body({"prompt_token_ids": [5, 6]}), reading())


@pytest.mark.failure_mode("F38")
@pytest.mark.parametrize("first_row", [None, 0, 2])
@pytest.mark.parametrize("form", ["object", "npy"])
def test_every_form_of_experts_is_one_value_trimmed_once(form: str, first_row: int | None) -> None:
    whole = experts_object(4) if form == "object" else experts_npy(4)
    trimmed = experts_object(2, 2) if form == "object" else experts_npy(2, 2)
    for field in [whole] + [trimmed] * (first_row == 2):
        body = generate_body(generate_choice(routed_experts=field))
        (completion,) = decode_generate(body, reading(experts_start=first_row))
        assert completion.experts is not None
        assert completion.experts.start == (first_row or 0)
        assert completion.experts.numpy().tolist() == expert_rows(4)[first_row or 0 :].tolist()


@pytest.mark.failure_mode("F38")
@pytest.mark.parametrize("field", [
    experts_object(3), experts_object(5), experts_npy(3), experts_object(3, 3), "bm90IG5weQ==",
    experts_object(4) | {"shape": [4, 2, 3]}, experts_object(4) | {"dtype": "float32"},
    experts_object(4) | {"shape": [16]}, experts_object(4) | {"data": "A"},
])  # fmt: skip
def test_bad_experts_fail_the_answer(field: Any) -> None:
    with pytest.raises(BadExperts):
        decode_generate(generate_body(generate_choice(routed_experts=field)), reading())


@pytest.mark.failure_mode("F38")
def test_experts_stay_with_their_choice() -> None:
    body = generate_body(generate_choice(1, routed_experts=experts_object(4)), generate_choice(0))
    first, second = decode_generate(body, reading(sampling={"n": 2}))
    assert first.experts is None
    assert second.experts is not None


@pytest.mark.failure_mode("F38")
def test_experts_that_were_requested_must_come() -> None:
    with pytest.raises(BadExperts, match="requested"):
        decode_generate(generate_body(), reading(experts_start=0))
    with pytest.raises(BadExperts, match="requested"):
        decode_dynamo(dynamo_body(), reading(experts_start=0))


def test_encoded_experts_equal_plain_ones_and_can_be_pickled() -> None:
    body = generate_body(generate_choice(routed_experts=experts_object(4)))
    (completion,) = decode_generate(body, reading())
    plain = RoutedExperts(expert_rows(4).tobytes(), (4, 2, 2), "uint8")
    assert completion.experts == plain
    assert plain == completion.experts
    assert pickle.loads(pickle.dumps(completion.experts)) == plain
    assert completion.experts != plain.from_row(1)


@pytest.mark.failure_mode("F46")
def test_a_prompt_logprob_is_the_prompt_tokens_own_entry() -> None:
    entries = [
        None,
        {"9": {"logprob": -0.1, "rank": 1}, "6": {"logprob": -3.0, "rank": 8}},
        {"7": {"logprob": -2.0, "decoded_token": "x"}},
    ]
    body = generate_body(prompt_logprobs=entries)
    (completion,) = decode_generate(body, reading(sampling={"prompt_logprobs": 1}))
    assert completion.prompt_logprobs is not None
    first, second, third = completion.prompt_logprobs
    assert first is None
    assert second is not None
    assert (second.token_id, second.logprob, second.rank) == (6, -3.0, 8)
    assert [(each.token_id, each.rank) for each in second.top] == [(9, 1)]
    assert third is not None
    assert third.logprob == -2.0


def test_prompt_logprobs_read_back_as_they_were_written() -> None:
    top = (Ranked(9, -0.5, 1), Ranked(6, -1.5, 2))
    prompt = [
        None,
        PromptLogprob(6, -1.5, 2, top),
        PromptLogprob(7, -0.25, 1, (Ranked(7, -0.25, 1), Ranked(3, -3.0, 2))),
    ]
    field = encode_prompt_logprobs(prompt, str)
    assert field is not None
    assert [list(place or ()) for place in field] == [[], ["6", "9"], ["7", "3"]]
    assert decode_prompt_logprobs(PROMPT, field, top=2) == prompt
    assert encode_prompt_logprobs(None) is None


@pytest.mark.failure_mode("F46")
@pytest.mark.parametrize("entries", [
    [None, {"9": {"logprob": -0.1}}, {"7": {"logprob": -2.0}}],
    [None, None, {"7": {"logprob": -2.0}}],
    [None, {"6": {"logprob": None}}, {"7": {"logprob": -2.0}}],
    [None, {"6": {"logprob": -9999.0}}, {"7": {"logprob": -2.0}}],
])  # fmt: skip
def test_a_missing_prompt_entry_is_an_error_with_its_position(entries: Any) -> None:
    body = generate_body(prompt_logprobs=entries)
    with pytest.raises(BadLogprob, match="position 1"):
        decode_generate(body, reading(sampling={"prompt_logprobs": 0}))


@pytest.mark.failure_mode("F46")
def test_prompt_logprobs_that_were_requested_must_come_for_every_token() -> None:
    with pytest.raises(BadLogprob, match="requested"):
        decode_generate(generate_body(), reading(sampling={"prompt_logprobs": 0}))
    with pytest.raises(Misaligned, match="3 prompt ids but 1"):
        decode_generate(
            generate_body(prompt_logprobs=[None]), reading(sampling={"prompt_logprobs": 0})
        )


@pytest.mark.failure_mode("F44")
@pytest.mark.parametrize("logprobs", ["entries", "flat"])
@pytest.mark.parametrize("npy", ["raw", "npy"])
def test_what_a_lockstep_server_encodes_comes_back_equal(npy: str, logprobs: str) -> None:
    context = reading(sampling={"prompt_logprobs": 0}, request_id="r")
    (made,) = decode_generate(
        generate_body(
            generate_choice(routed_experts=experts_object(4), stop_reason=12),
            prompt_logprobs=[None, {"6": {"logprob": -0.1}}, {"7": {"logprob": -1e-17, "rank": 1}}],
            logprob_mode="processed", temperature=0.3, worker="w", adapter="a",
        ),
        context,
    )  # fmt: skip
    form = Form(logprobs=logprobs, prompt_ids=True, experts=npy)
    body = generate_response([made], request_id="r", model="m", created=0, form=form)
    assert decode_generate(body, context) == [made]


@pytest.mark.failure_mode("F05")
@pytest.mark.failure_mode("F06")
def test_flat_logprobs_are_held_to_the_same_contract() -> None:
    short = generate_choice(logprobs={"values": LOGPROBS[:-1], "ranks": None})
    with pytest.raises(Misaligned):
        decode_generate(generate_body(short), reading())
    gap = generate_choice(logprobs={"values": [LOGPROBS[0], None], "ranks": None})
    with pytest.raises(BadLogprob, match="position 1"):
        decode_generate(generate_body(gap), reading())


def test_an_error_in_a_200_answer_is_raised_as_what_it_is() -> None:
    body = json.dumps({"error": {"message": "slow down", "code": 429}}).encode()
    with pytest.raises(Exception, match="slow down") as caught:
        decode_generate(body, reading())
    assert caught.value.status == 429


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b'{"choices": 3}', b"[]", b'{"choices": [{}', b"\xff"]
)
def test_what_is_no_answer_at_all_is_a_contract_error(body: bytes) -> None:
    for read in (decode_generate, decode_dynamo):
        with pytest.raises(ContractError):
            read(body, reading())


def test_a_stream_gives_the_completion_of_the_whole_answer() -> None:
    whole = generate_body(
        generate_choice(0, routed_experts=experts_object(4), stop_reason=12), generate_choice(1)
    )
    context = reading(sampling={"n": 2}, request_id="r")
    stream = GenerateStreamDecoder(context)
    deltas = []
    for index in (0, 1):
        for at in (0, 1):
            last = at == 1
            chunk = generate_choice(
                index,
                token_ids=IDS[at : at + 1],
                finish_reason="stop" if last else None,
                weight_versions=generate_choice()["weight_versions"] if last else None,
                routed_experts=experts_object(4) if last and index == 0 else None,
                stop_reason=12 if last and index == 0 else None,
                **content(entry(IDS[at], LOGPROBS[at])),
            )
            deltas += stream.feed(generate_body(chunk))
    completion: list[Completion] = stream.finish()
    assert completion == decode_generate(whole, context)
    assert [(d.index, d.token_ids, d.logprobs) for d in deltas] == [
        (0, [11], [-0.5]), (0, [12], [-0.25]), (1, [11], [-0.5]), (1, [12], [-0.25])
    ]  # fmt: skip


def test_a_reading_says_what_a_silent_server_does_not() -> None:
    silent = generate_body(generate_choice(weight_versions=None))
    context = Reading(reading().request, "processed", "v7", "http://w", "ada")
    (completion,) = decode_generate(silent, context)
    assert (completion.versions[0].version, completion.worker, completion.adapter) == (
        "v7",
        "http://w",
        "ada",
    )
