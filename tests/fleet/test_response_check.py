"""Responses that no engine can return: the worker is named, counted and ejected."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from lockstep.backends.transport import GenerateRequest, StreamDelta
from lockstep.fleet.response_check import ResponseCheck
from lockstep.fleet.routing.affinity import Affinity
from lockstep.fleet.worker import Worker
from lockstep.http.client.client import HttpClient
from lockstep.tokens import Completion, Sampling, VersionSpan
from lockstep.tokens.errors import ImpossibleResponse
from tests.fleet.fakes import fleet

REQUEST = GenerateRequest(prompt_ids=[1, 2], sampling=Sampling(max_tokens=3))
WRONG: dict[str, tuple[list[int], list[float], str]] = {
    "a positive logprob": ([5, 6], [-0.1, 0.5], r"logprob 0\.5"),
    "an id outside the vocabulary": ([10**7], [-0.1], "token id 10000000, expected 0 to 511"),
    "a negative id": ([-1], [-0.1], "token id -1"),
    "more tokens than allowed": ([5] * 4, [-0.1] * 4, "4 tokens, but max_tokens is 3"),
}


def completion(ids: list[int], logprobs: list[float]) -> Completion:
    return Completion(
        token_ids=ids,
        logprobs=logprobs,
        finish="stop",
        prompt_ids=[1, 2],
        versions=(VersionSpan("v1", 0, len(ids)),),
    )


class _Transport:
    """A worker's data side that returns given tokens."""

    def __init__(self, ids: list[int], logprobs: list[float]) -> None:
        self.ids, self.logprobs = ids, logprobs

    async def generate(self, _: GenerateRequest) -> list[Completion]:
        return [completion(self.ids, self.logprobs)]

    async def stream(self, _: GenerateRequest) -> AsyncIterator[StreamDelta | Completion]:
        for token, logprob in zip(self.ids, self.logprobs, strict=True):
            yield StreamDelta(0, [token], [logprob])
        yield completion(self.ids, self.logprobs)


def worker_with(ids: list[int], logprobs: list[float]) -> Worker:
    transport: Any = _Transport(ids, logprobs)
    worker = Worker("w7", "http://w7", HttpClient("http://w7"), opened=transport)
    worker.response_check.vocab_size = 512
    return worker


@pytest.mark.failure_mode("F76")
@pytest.mark.parametrize("name", WRONG)
async def test_an_impossible_response_is_the_fault_of_its_worker(name: str) -> None:
    ids, logprobs, says = WRONG[name]
    worker = worker_with(ids, logprobs)
    with pytest.raises(ImpossibleResponse, match=f"worker w7 .*{says}") as refused:
        await worker.generate(REQUEST)
    assert refused.value.status == 502
    streamed: list[int] = []

    async def read() -> None:
        async for item in worker.stream(REQUEST):
            streamed.extend(item.token_ids)

    with pytest.raises(ImpossibleResponse, match="worker w7"):
        await read()
    assert len(streamed) < len(ids), "the wrong token is not delivered"


async def test_a_logprob_rounded_above_zero_and_the_last_id_pass() -> None:
    worker = worker_with([511, 0, 3], [1e-7, -0.5, 0.0])
    assert len((await worker.generate(REQUEST))[0].token_ids) == 3


@pytest.mark.failure_mode("F76")
async def test_a_worker_with_an_impossible_response_is_counted_and_ejected() -> None:
    check = ResponseCheck()

    async def call(worker: Worker) -> None:
        check.check(REQUEST, [completion([-1], [-0.1])], worker.id)

    async with fleet(2, probe_seconds=60.0) as (pool, _):
        with pytest.raises(ImpossibleResponse):
            await pool.run(Affinity(session="s"), call)
        assert sorted(worker.impossible for worker in pool.workers) == [0, 1]
        (ejected,) = [worker for worker in pool.workers if not worker.serves]
        assert "impossible response" in str(ejected.reason)
