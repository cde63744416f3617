"""Ids that are handed on undecoded are still checked, and read like the list they are."""

from __future__ import annotations

import msgspec
import pytest

from lockstep.tokens import Sampling
from lockstep.tokens.errors import BadRequest, BadTokenId, LockstepError
from lockstep.wire.ask import Ask
from lockstep.wire.ask_generate import encode_vllm
from lockstep.wire.generate import decode_relayed, decode_request
from lockstep.wire.raw_ids import RawIds


def body(ids: str) -> bytes:
    return b'{"token_ids": %b, "sampling_params": {"max_tokens": 4}}' % ids.encode()


@pytest.mark.parametrize("ids", ["[1]", "[1,2,3]", " [ 1 ,\n2,\t3 ] ", "[0, 151935, 2147483648]"])
def test_plain_ids_stay_as_they_came_and_read_as_their_list(ids: str) -> None:
    asked = decode_relayed(body(ids))
    known = decode_request(body(ids)).token_ids
    assert isinstance(asked.token_ids, RawIds)
    assert len(asked.token_ids) == len(known)
    assert asked.token_ids == known
    assert known == asked.token_ids
    assert list(asked.token_ids) == known
    assert asked.token_ids[-1] == known[-1]
    sent = encode_vllm(Ask(prompt_ids=asked.token_ids, sampling=Sampling()), mode="raw")
    assert msgspec.json.decode(sent)["token_ids"] == known


@pytest.mark.parametrize(
    "ids",
    ["[]", "[-1]", "[1.0]", "[1e3]", "[true]", "[null]", '["1"]', "[[1]]", "[1,[2]]", "7", "null",
     '"1"', "{}", "[1, -2]"],
)  # fmt: skip
def test_anything_else_gets_the_error_of_the_strict_decoder(ids: str) -> None:
    def error(decode) -> LockstepError:
        with pytest.raises((BadRequest, BadTokenId)) as caught:
            Ask(prompt_ids=decode(body(ids)).token_ids)
        return caught.value

    strict, relayed = error(decode_request), error(decode_relayed)
    assert (type(relayed), relayed.message, relayed.param) == (
        type(strict),
        strict.message,
        strict.param,
    )


@pytest.mark.parametrize("ids", ["[1,,2]", "[1 2]", "[01]", "[1", "[1,]", "1]"])
def test_what_is_no_json_is_refused(ids: str) -> None:
    with pytest.raises(BadRequest):
        decode_relayed(body(ids))
