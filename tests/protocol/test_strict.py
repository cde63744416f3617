"""Strict decoding: an error names the field, the value and what was expected."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.protocol.json.strict import decode
from lockstep.protocol.vllm.generate_request import decode_request
from lockstep.tokens import errors
from lockstep.tokens.ids import check_ids


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    size: int


class Body(msgspec.Struct, forbid_unknown_fields=True):
    ids: list[int]
    inner: Inner | None = None


DECODER = msgspec.json.Decoder(Body)


@pytest.mark.parametrize(
    ("body", "kind", "param", "words"),
    [
        (b'{"ids": [1, 2.5]}', errors.BadRequest, "ids[1]", "2.5"),
        (b'{"ids": ["x"]}', errors.BadRequest, "ids[0]", '"x"'),
        (b'{"ids": [], "inner": {"size": "big"}}', errors.BadRequest, "inner.size", '"big"'),
        (b'{"ids": [], "inner": {"sise": 1}}', errors.UnknownField, "inner.sise", "sise"),
        (b'{"ids": [], "what": 1}', errors.UnknownField, "what", "what"),
        (b'{"inner": null}', errors.BadRequest, "ids", "missing"),
        (b'{"ids": [], "inner": {}}', errors.BadRequest, "inner.size", "missing"),
        (b'{"ids": ', errors.BadRequest, "body", "not JSON"),
        (b"[]", errors.BadRequest, "body", "[]"),
        (b'{"ids": "\xff"}', errors.BadRequest, "ids", "cannot be read"),
    ],
)
def test_an_error_names_field_and_value(
    body: bytes, kind: type[errors.BadRequest], param: str, words: str
) -> None:
    with pytest.raises(kind) as caught:
        decode(DECODER, body)
    assert caught.value.param == param
    assert words in caught.value.message


@given(st.binary(max_size=200))
def test_any_bytes_give_a_request_or_a_typed_error(body: bytes) -> None:
    try:
        decode_request(body)
    except errors.BadRequest as error:
        assert error.message


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["token_ids", "sampling_params", "n", "stop", "logit_bias", "priority"]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_any_json_gives_a_request_or_a_typed_error(value: object) -> None:
    try:
        decode_request(msgspec.json.encode(value)).sampling()
    except errors.BadRequest as error:
        assert error.message


@pytest.mark.failure_mode("F18")
def test_the_first_bad_id_is_named() -> None:
    check_ids([0, 511], 512)
    for ids, param in (([], "token_ids"), ([1, 512, 900], "token_ids[1]"), ([-1], "token_ids[0]")):
        with pytest.raises(errors.BadTokenId) as caught:
            check_ids(ids, 512)
        assert caught.value.param == param
