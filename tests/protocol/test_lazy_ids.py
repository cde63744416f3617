"""Ids that are handed on undecoded are still checked, and read like the list they are."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.json.lazy_ids import LazyIds, as_json, as_list
from lockstep.protocol.vllm.encode_generate import encode_vllm
from lockstep.protocol.vllm.generate_request import decode_relayed, decode_request
from lockstep.tokens import Sampling
from lockstep.tokens.errors import BadRequest, BadTokenId, LockstepError


def body(ids: str) -> bytes:
    return b'{"token_ids": %b, "sampling_params": {"max_tokens": 4}}' % ids.encode()


@pytest.mark.parametrize("ids", ["[1]", "[1,2,3]", " [ 1 ,\n2,\t3 ] ", "[0, 151935, 2147483648]"])
def test_plain_ids_stay_as_they_came_and_read_as_their_list(ids: str) -> None:
    _, lazy = decode_relayed(body(ids))
    known = decode_request(body(ids)).token_ids
    assert isinstance(lazy, LazyIds)
    assert len(lazy) == len(known)
    sent = encode_vllm(GenerateRequest(prompt_ids=lazy, sampling=Sampling()), mode="raw")
    assert lazy._ids is None  # so far nobody had to look
    assert lazy == known
    assert known == lazy
    assert list(lazy) == as_list(lazy) == known
    assert lazy[-1] == known[-1]
    assert msgspec.json.decode(sent)["token_ids"] == known


@pytest.mark.parametrize(
    "ids",
    ["[]", "[-1]", "[1.0]", "[1e3]", "[true]", "[null]", '["1"]', "[[1]]", "[1,[2]]", "7", "null",
     '"1"', "{}", "[1, -2]"],
)  # fmt: skip
def test_anything_else_gets_the_error_of_the_strict_decoder(ids: str) -> None:
    def error(decode) -> LockstepError:
        with pytest.raises((BadRequest, BadTokenId)) as caught:
            GenerateRequest(prompt_ids=decode(body(ids)))
        return caught.value

    strict = error(lambda body: decode_request(body).token_ids)
    relayed = error(lambda body: decode_relayed(body)[1])
    assert (type(relayed), relayed.message, relayed.param) == (
        type(strict),
        strict.message,
        strict.param,
    )


@pytest.mark.parametrize("ids", ["[1,,2]", "[1 2]", "[01]", "[1", "[1,]", "1]"])
def test_what_is_no_json_is_refused(ids: str) -> None:
    with pytest.raises(BadRequest):
        decode_relayed(body(ids))


@pytest.mark.parametrize("ids", [[1], [3, 1, 2], range(1, 4), (7, 8)])
def test_any_sequence_can_be_had_as_a_list_and_as_json(ids: Sequence[int]) -> None:
    assert as_list(ids) == list(ids)
    assert msgspec.json.decode(bytes(as_json(ids))) == list(ids)
    same = [1, 2]
    assert as_list(same) is same
