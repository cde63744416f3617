"""Events that came together are read in one go, and with the same result as one by one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.common.response import Reading
from lockstep.protocol.vllm.decode_generate import GenerateStreamDecoder
from lockstep.tokens import Sampling
from lockstep.tokens.errors import ContractError, LockstepError, Misaligned


def event(
    token: int, *, index: int = 0, finish: str | None = None, flat: bool = False, **extra: Any
) -> bytes:
    entry = {"token_id": token, "token": f"token_id:{token}", "logprob": -0.5, "rank": 1}
    logprobs = {"values": [-0.5], "ranks": [1]} if flat else {"content": [entry]}
    choice = {"index": index, "token_ids": [token], "logprobs": logprobs, "finish_reason": finish}
    if finish:
        choice["weight_versions"] = [{"version": "1", "start": 0, "end": 3}]
    return msgspec.json.encode({"request_id": "r", "choices": [choice], **extra})


def named_by_text(token: int) -> bytes:
    entry = {"token": f"token_id:{token}", "logprob": -0.5}
    return msgspec.json.encode(
        {"choices": [{"index": 0, "token_ids": [token], "logprobs": {"content": [entry]}}]}
    )


def stream(n: int = 1) -> GenerateStreamDecoder:
    return GenerateStreamDecoder(
        Reading(GenerateRequest(prompt_ids=[1, 2], sampling=Sampling(n=n)))
    )


@pytest.mark.parametrize("events", [
    [event(5), event(6), event(7, finish="stop")],
    [event(5, flat=True), event(6, flat=True), event(7, flat=True, finish="stop")],
    [named_by_text(5), event(6), event(7, finish="stop")],
    [event(5), b'{"choices":\n[]}', event(6), event(7, finish="length", worker="w")],
])  # fmt: skip
def test_a_batch_reads_like_its_events_one_by_one(events: list[bytes]) -> None:
    one_by_one, at_once = stream(), stream()
    singly = [one_by_one.feed(each) for each in events]
    together = [
        [(delta.index, delta.token_ids, delta.logprobs) for delta in deltas] for deltas in singly
    ]
    collected = []
    for tokens in at_once.collect(events):
        collected.append([(index, list(ids), list(values)) for index, ids, values in tokens])
    assert collected == together
    assert at_once.finish() == one_by_one.finish()


@pytest.mark.parametrize(("broken", "error"), [
    (b'{"choices": [', ContractError),
    (b'{"choices": []} {"choices": []}', ContractError),
    (b'{"choices": 7}', ContractError),
    (event(6).replace(b'"token_id":6', b'"token_id":9'), Misaligned),
    (b'{"error": {"message": "boom", "code": 500}}', LockstepError),
])  # fmt: skip
def test_a_broken_event_is_met_at_its_place(broken: bytes, error: type[LockstepError]) -> None:
    collected = stream().collect([event(5), event(6), broken, event(7, finish="stop")])
    assert [list(next(collected)[0][1]) for _ in range(2)] == [[5], [6]]
    with pytest.raises(error):
        next(collected)


def test_two_halves_of_an_event_are_not_taken_for_a_whole_one() -> None:
    whole = event(5, finish="stop")
    with pytest.raises(ContractError):
        list(stream().collect([whole[:20], whole[20:]]))
    with pytest.raises(ContractError):
        list(stream().collect([whole + whole, whole[:20], whole[20:]]))
