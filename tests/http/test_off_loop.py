"""Which histories are read by a thread."""

from __future__ import annotations

from time import monotonic, thread_time
from typing import Any

import pytest

from lockstep.http.off_loop import REST, Pace, is_large_history

SAYING = {"role": "user", "content": "hi"}


def calling(arguments: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


@pytest.mark.parametrize(("messages", "tools", "large"), [
    ([SAYING] * 900, None, False),
    ([{**SAYING, "content": "x" * 10_000_000}], None, False),
    ([calling('{"a": 1}')] * 100, [{"type": "function"}], False),
    ([SAYING] * 1001, None, True),
    ([calling('["' + "x" * 200_000 + '"]')], None, True),
    ([{**SAYING, "extra": "x" * 200_000}], None, True),
    ([SAYING], [{"schema": "x" * 200_000}], True),
    ([SAYING], [object()], False),
])  # fmt: skip
def test_a_history_is_large_by_its_json_not_by_its_text(
    messages: Any, tools: Any, large: bool
) -> None:
    assert is_large_history(messages, tools) is large


def test_the_paced_thread_rests_in_proportion_to_the_work_of_the_call_before() -> None:
    pace = Pace()

    def work() -> tuple[float, float]:
        """When the call began, and what it took."""
        begun, cpu = monotonic(), thread_time()
        while thread_time() - cpu < 0.02:
            pass
        return begun, monotonic()

    (first, ended), (second, _) = (pace.thread.submit(pace.run, work).result() for _ in range(2))
    assert second - ended >= 0.9 * REST * 0.02
    assert first < ended
