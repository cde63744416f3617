"""Whether a request is read on the event loop, or by a thread because it would hold the loop."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import msgspec

MESSAGES = 1000
BYTES = 128 << 10
"""Up to so many messages, and bytes of JSON in calls and tools, reading takes milliseconds."""
PLAIN = {"role", "content", "tool_call_id", "name"}


def is_light(messages: Iterable[Any], tools: Iterable[Any] | None, known: int = 0) -> bool:
    """Whether messages and tools are read sooner than a thread would begin with them.

    The first `known` messages were read already.
    """
    if not isinstance(messages, list) or len(messages) > MESSAGES:
        return False
    size = _json_size(tools) if tools else 0
    for message in islice(messages, known, None):
        # Text is only compared; what is JSON is decoded, and written again with sorted keys.
        if isinstance(message, dict) and not message.keys() <= PLAIN:
            size += _json_size({key: message[key] for key in message.keys() - PLAIN})
    return size <= BYTES


def _json_size(value: object) -> int:
    try:
        return len(msgspec.json.encode(value))
    except (TypeError, ValueError, OverflowError, RecursionError):
        return 0  # an object of some SDK, or nothing that can be read: not for this to say
