"""What takes long to read is read by a thread."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.ledger.reading_cost import is_light

SAYING = {"role": "user", "content": "hi"}


def calling(arguments: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


@pytest.mark.parametrize(("messages", "tools", "light"), [
    ([SAYING] * 900, None, True),
    ([{**SAYING, "content": "x" * 10_000_000}], None, True),
    ([calling('{"a": 1}')] * 100, [{"type": "function"}], True),
    ([SAYING] * 1001, None, False),
    ([calling('["' + "x" * 200_000 + '"]')], None, False),
    ([{**SAYING, "extra": "x" * 200_000}], None, False),
    ([SAYING], [{"schema": "x" * 200_000}], False),
    ([SAYING], [object()], True),
])  # fmt: skip
def test_text_is_light_and_much_json_is_not(messages: Any, tools: Any, light: bool) -> None:
    assert is_light(messages, tools) is light
