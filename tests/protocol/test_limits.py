"""What a body holds is told without decoding it, and past a limit it is refused."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.protocol.json.strict import (
    LIMITS,
    JsonShape,
    RequestLimits,
    check_shape,
    depth,
    rough_values,
)
from lockstep.protocol.vllm.generate_request import decode_relayed
from lockstep.tokens.errors import BadRequest, TooLarge

TEXT = st.text(alphabet='ab"\\{}[],:\n é', max_size=8)
VALUES = st.recursive(
    st.none() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=30,
)


def counted(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(1 + counted(each) for each in value.values())
    if isinstance(value, list):
        return 1 + sum(map(counted, value))
    return int(isinstance(value, str))


@settings(max_examples=200, deadline=None)
@given(VALUES, st.booleans(), st.integers(0, 2**32))
def test_the_shape_of_json_is_exact_however_it_is_cut(value: Any, ascii: bool, seed: int) -> None:
    raw, shape, dice = (
        json.dumps(value, ensure_ascii=ascii).encode(),
        JsonShape(),
        random.Random(seed),
    )
    while raw:
        size = dice.randint(1, 9)
        shape.feed(raw[:size])
        raw = raw[size:]
    assert shape.values == counted(value)


def test_what_text_quotes_is_rough_and_not_counted_in_the_end() -> None:
    raw = json.dumps(json.dumps([{"a": "b"}] * 100)).encode()
    assert rough_values(raw) > 300
    assert rough_values(b'{"a": ["b", {}]}') == 5
    shape = JsonShape()
    shape.feed(raw)
    assert (shape.values, shape.items) == (1, 0)


def test_a_body_is_looked_at_no_further_than_to_its_limit() -> None:
    limits = RequestLimits(values=1000, items=5000)
    check_shape([b"[" + b'"a",' * 999 + b"1]"], limits)
    with pytest.raises(TooLarge, match="more than 1000 objects, lists and strings"):
        check_shape([b"[" + b'"a",' * 1_000_000], limits)
    with pytest.raises(TooLarge, match="more than 5000 items"):
        check_shape([b"[", b"1," * 2501, b"1," * 2501, b"1]"], limits)


@pytest.mark.parametrize(("value", "deep"), [([], 1), ({"a": 1}, 1), ([[]], 2), ([{"a": [1]}], 3)])
def test_depth_counts_lists_and_objects(value: Any, deep: int) -> None:
    assert depth(value, 10) == deep
    assert depth(value, deep - 1) is None or deep == 1


class Params(msgspec.Struct):
    stop_token_ids: list[int] = []


class Prompts(msgspec.Struct):
    prompt: str | list[Any]


def test_the_ids_of_one_prompt_are_not_many_prompts() -> None:
    LIMITS.check(Prompts([1] * 100_000))
    LIMITS.check(Prompts("x" * 100_000))
    for many in (["a"] * 5000, [[1]] * 5000):
        with pytest.raises(BadRequest, match="prompt lists 5000"):
            LIMITS.check(Prompts(many))


class Body(msgspec.Struct):
    messages: list[Any] = []
    metadata: dict[str, Any] = {}
    sampling_params: Params | None = None


def test_lists_of_any_dialect_are_counted_by_their_name() -> None:
    LIMITS.check(Body([{}] * LIMITS.messages))
    with pytest.raises(BadRequest, match="--limit messages=") as refused:
        LIMITS.check(Body([{}] * (LIMITS.messages + 1)))
    assert refused.value.param == "messages"
    with pytest.raises(BadRequest) as refused:
        LIMITS.check(Body(sampling_params=Params([1] * 2000)))
    assert refused.value.param == "sampling_params.stop_token_ids"
    with pytest.raises(BadRequest, match="more than 3 levels") as refused:
        RequestLimits(nesting=3).check(Body(metadata={"a": [[[[1]]]]}))
    assert refused.value.param == "metadata"


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"allowed_token_ids": [7] * 300_000}, "sampling_params.allowed_token_ids"),
        ({"stop": ["x"] * 2000}, "sampling_params.stop"),
        ({"guided_choice": ["x"] * 5000}, "sampling_params.guided_choice"),
        ({"structured_outputs": {"choice": ["x"] * 5000}},
         "sampling_params.structured_outputs.choice"),
    ],
)  # fmt: skip
def test_lists_of_sampling_options_are_bounded(params: dict[str, Any], field: str) -> None:
    body = msgspec.json.encode({"token_ids": [1], "sampling_params": params})
    fields, _ = decode_relayed(body)
    with pytest.raises(BadRequest, match=r"--limit") as refused:
        LIMITS.check(fields)
    assert refused.value.param == field


def test_repeated_ids_are_dropped() -> None:
    params = {"allowed_token_ids": [7, 8, 7] * 1000, "stop_token_ids": [3, 3]}
    fields, _ = decode_relayed(msgspec.json.encode({"token_ids": [1], "sampling_params": params}))
    assert fields.sampling().allowed_token_ids == (7, 8)
    assert fields.sampling().stop_token_ids == (3,)


def test_lists_of_ids_are_counted_without_decoding() -> None:
    """Whatever the dialect, and however the body is spelt."""
    many = LIMITS.allowed_token_ids + 1
    for body in (
        b'{"sampling_params": {"allowed_token_ids" :\n [' + b"7," * (many - 1) + b"7]}}",
        b'{"required_prefix_token_ids":[' + b"7," * LIMITS.required_prefix_token_ids + b"7]}",
        b'{"allowed_token_ids":[7],"allowed_token_ids":[' + b"7," * many,
    ):
        with pytest.raises(BadRequest, match="--limit") as refused:
            LIMITS.check_id_lists(body, body.count(b","))
        assert str(refused.value.param).endswith("_token_ids")
    # A prompt of many ids, a list that is just within the limit, and text that looks like a list.
    inside = b'{"allowed_token_ids":[' + b"7," * (many - 2) + b"7]"
    text = msgspec.json.encode('"allowed_token_ids":[' + "7," * many)
    for body in (b'{"prompt":[' + b"7," * many * 8 + b"7]}", inside + b"}", b'{"a":' + text + b"}"):
        LIMITS.check_id_lists(body, body.count(b","))
