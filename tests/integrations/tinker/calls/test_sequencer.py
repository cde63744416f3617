"""Calls of a model: in the order of seq_id, each once, and none that waits for ever."""

from __future__ import annotations

import asyncio

import pytest

from lockstep.integrations.tinker.calls.futures import Futures, Result
from lockstep.integrations.tinker.calls.sequencer import Sequencer, Work
from lockstep.tokens.errors import BadRequest, Gone

SOON = 5.0


class Calls:
    """Records the calls that ran, in their order."""

    def __init__(self, gap_seconds: float = 60.0) -> None:
        self.done: list[int] = []
        self.futures = Futures()
        self.order = Sequencer(self.futures, gap_seconds=gap_seconds)

    def work(self, seq: int, error: Exception | None = None) -> Work:
        async def work() -> Result:
            await asyncio.sleep(0)
            if error is not None:
                raise error
            self.done.append(seq)
            return Result.of({"seq": seq})

        return work

    def send(self, seq: int, contents: bytes = b"", error: Exception | None = None) -> str:
        return self.order.submit(seq, contents, self.work(seq, error)).request_id

    async def result(self, request_id: str) -> Result:
        result = await self.futures.wait(request_id, SOON)
        assert result is not None
        return result


@pytest.mark.failure_mode("F80")
async def test_calls_run_in_the_order_of_seq_id_and_not_of_arrival() -> None:
    calls = Calls()
    ids = {seq: calls.send(seq) for seq in (3, 2, 5, 4)}
    await asyncio.sleep(0.05)
    assert calls.done == []
    ids[1] = calls.send(1)
    for seq, request_id in ids.items():
        assert (await calls.result(request_id)).body == b'{"seq":%d}' % seq
    assert calls.done == [1, 2, 3, 4, 5]


@pytest.mark.failure_mode("F80")
async def test_a_repeated_call_is_the_same_call_before_and_after_it_ran() -> None:
    calls = Calls()
    first = calls.send(2, b"same")
    assert calls.send(2, b"same") == first
    await calls.result(calls.send(1))
    await calls.result(first)
    assert calls.send(2, b"same") == first
    assert (await calls.result(first)).body == b'{"seq":2}'
    assert calls.done == [1, 2]


async def test_a_seq_id_with_other_contents_is_an_error() -> None:
    calls = Calls()
    await calls.result(calls.send(1, b"one"))
    with pytest.raises(BadRequest, match="seq_id 1 was used for another call"):
        calls.send(1, b"two")


async def test_a_failed_call_does_not_block_the_next() -> None:
    calls = Calls()
    failed = calls.send(1, error=BadRequest("no good"))
    await calls.result(calls.send(2))
    result = await calls.result(failed)
    assert result.failed
    assert result.body == b'{"error":"no good","category":"user"}'


async def test_a_rejected_call_does_not_block_the_next() -> None:
    calls = Calls()
    waiting = calls.send(2)
    calls.order.consume(1, calls.work(-1))
    await calls.result(waiting)
    assert calls.done == [-1, 2]


async def test_calls_behind_a_missing_one_fail_after_a_timeout() -> None:
    calls = Calls(gap_seconds=0.05)
    behind = [calls.send(seq) for seq in (2, 3)]
    for request_id in behind:
        result = await calls.result(request_id)
        assert result.failed
        assert b"seq_id 1 did not arrive" in result.body
    with pytest.raises(BadRequest, match="arrived too late"):
        calls.send(1)
    await calls.result(calls.send(4))
    assert calls.done == [4]


async def test_results_can_be_fetched_again_until_they_expire() -> None:
    calls = Calls()
    request_id = calls.send(1)
    assert await calls.result(request_id) == await calls.result(request_id)
    with pytest.raises(Gone, match="the server was restarted since"):
        await calls.futures.wait("0123-7", SOON)
    own = request_id.partition("-")[0]
    with pytest.raises(Gone, match="its result has expired"):
        await calls.futures.wait(f"{own}-999", SOON)


async def test_an_internal_error_is_sent_to_the_client_and_logged_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = Calls()
    refused = await calls.result(calls.send(1, error=BadRequest("no such loss")))
    assert (refused.failed, caplog.text) == (True, "")
    broken = await calls.result(calls.send(2, error=ZeroDivisionError("half a batch")))
    assert b"half a batch" in broken.body
    assert "ZeroDivisionError" in caplog.text
    assert "Traceback" in caplog.text
