"""Taking the base64 out of a body changes nothing about what the body says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.protocol.json.base64_extract import Base64Extractor, extract_base64

BASE64 = st.text(alphabet="ABCxyz019+/=", max_size=40)
TRICKY = st.one_of(
    st.sampled_from(
        [
            "routed_experts",
            '"routed_experts":{"data":"QQ=="}',
            '\\"routed_experts\\":',
            'x"routed_experts',
            "routed_experts\\",
            '{"routed_experts": "',
            "data",
            ":0",
            "\\",
            '"',
        ]
    ),
    st.text(max_size=12),
)
EXPERTS = st.one_of(
    st.none(),
    BASE64,
    TRICKY,
    st.fixed_dictionaries(
        {"data": st.one_of(BASE64, TRICKY, st.none())},
        optional={
            "shape": st.lists(st.integers(0, 9), max_size=3),
            "dtype": TRICKY,
            "extra": st.dictionaries(TRICKY, TRICKY, max_size=2),
        },
    ).flatmap(lambda fields: st.permutations(list(fields.items())).map(dict)),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), TRICKY),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(TRICKY, inner, max_size=3),
        st.tuples(EXPERTS, inner).map(lambda two: {"routed_experts": two[0], "x": two[1]}),
    ),
    max_leaves=12,
)
FORMS = st.sampled_from(
    [{"separators": (",", ":")}, {"indent": 2}, {}, {"ensure_ascii": False}, {"sort_keys": True}]
)


def restored(value: Any, extracted: Any) -> Any:
    """The decoded body with each mark under a routed_experts key put back to what it stands for."""
    if isinstance(value, list):
        return [restored(one, extracted) for one in value]
    if not isinstance(value, dict):
        return value
    result = {}
    for key, inner in value.items():
        if key == "routed_experts" and isinstance(inner, str):
            result[key] = bytes(extracted.text(inner)).decode()
        elif key == "routed_experts" and isinstance(inner, dict):
            kept = restored(inner, extracted)
            if isinstance(inner.get("data"), str):
                kept["data"] = bytes(extracted.text(inner["data"])).decode()
            result[key] = kept
        else:
            result[key] = restored(inner, extracted)
    return result


def has_mark(value: Any) -> bool:
    """Whether the body itself holds what a mark looks like, which base64 never does."""
    return '":0"' in json.dumps(value)


@settings(max_examples=400, deadline=None)
@given(value=VALUES, form=FORMS, most=st.integers(0, 6))
def test_nothing_is_lost_or_mixed_up(value: Any, form: dict[str, Any], most: int) -> None:
    body = json.dumps(value, **form).encode()
    extracted = extract_base64(bytearray(body), most)
    decoded = json.loads(bytes(extracted.json))
    if not has_mark(value):
        assert restored(decoded, extracted) == value


@settings(max_examples=400, deadline=None)
@given(value=VALUES, form=FORMS, cuts=st.lists(st.integers(1, 30), min_size=1, max_size=8))
def test_a_body_in_pieces_says_the_same(value: Any, form: dict[str, Any], cuts: list[int]) -> None:
    body = json.dumps(value, **form).encode()
    extractor, at = Base64Extractor(), 0
    while at < len(body):
        size = cuts[at % len(cuts)]
        extractor.feed(body[at : at + size])
        at += size
    extracted = extractor.finish()
    if not has_mark(value):
        assert restored(json.loads(bytes(extracted.json)), extracted) == value


@pytest.mark.parametrize("field", ['"%s"', '{"shape":[1,2,3],"data":"%s","dtype":"uint8"}'])
@pytest.mark.parametrize("size", [1, 7, 50])
def test_long_base64_stays_in_the_pieces_in_which_it_came(field: str, size: int) -> None:
    text = "QUJD" * 100
    body = ('{"a":1,"routed_experts":' + field % text + ',"b":[2]}').encode()
    extractor = Base64Extractor()
    for at in range(0, len(body), size):
        extractor.feed(body[at : at + size])
    extracted = extractor.finish()
    (value,) = extracted.values
    assert bytes(value) == text.encode()
    assert (len(value), value.start(6), value.end(2)) == (400, b"QUJDQU", b"JD")
    assert len(extracted.json) < 100


@settings(max_examples=200, deadline=None)
@given(body=st.binary(max_size=80).map(lambda junk: b'{"routed_experts":' + junk))
def test_broken_json_is_left_to_the_decoder(body: bytes) -> None:
    extract_base64(body, 3)


@pytest.mark.failure_mode("F38")
def test_the_text_inside_strings_is_not_taken_for_a_key() -> None:
    text = 'he said "routed_experts":{"data":"QUJD"} and left'
    body = json.dumps({"text": text, "routed_experts": {"data": "WFla"}}).encode()
    extracted = extract_base64(body, 4)
    assert [bytes(value) for value in extracted.values] == [b"WFla"]
    assert json.loads(bytes(extracted.json))["text"] == text


@pytest.mark.failure_mode("F38")
def test_a_key_that_only_ends_like_the_real_one_is_left_alone() -> None:
    body = json.dumps({'a"routed_experts': "QUJD", "xrouted_experts": "QUJD"}).encode()
    assert extract_base64(body, 4).values == ()


def test_the_bytes_are_not_copied() -> None:
    body = bytearray(b'{"routed_experts":{"shape":[1,1,3],"data":"QUJD","dtype":"uint8"}}')
    (value,) = extract_base64(body).values
    assert value.parts[0].obj is body


def test_escaped_base64_is_decoded_as_json() -> None:
    extracted = extract_base64(b'{"routed_experts":{"data":"QU\\/D"}}')
    assert extracted.values == ()
    assert (
        bytes(extracted.text(json.loads(bytes(extracted.json))["routed_experts"]["data"]))
        == b"QU/D"
    )
