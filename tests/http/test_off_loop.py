"""Which histories are read by a thread."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.http.off_loop import is_large_history

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
