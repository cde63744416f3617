"""Items that a request references by id instead of repeating them, as the Vercel AI SDK does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lockstep.gateway.responses.tool_names import ToolNames
from lockstep.gateway.responses.write import output_items
from lockstep.protocol.openai.responses_response import Fields, message_item
from lockstep.render.messages import Plain
from lockstep.tokens.errors import BadRequest, NotFound

KIND = "item_reference"
REASONING, TEXT, CALLS = "rs_", "msg_", ("fc_", "ctc_")
"""Prefixes of the ids of output items: two name the turn, and those of calls the call."""


def referenced_ids(items: str | list[dict[str, Any]]) -> list[str]:
    """Return the ids of items that an input references. Raises BadRequest for one without an id."""
    names = []
    for at, item in enumerate(() if isinstance(items, str) else items):
        if item.get("type") != KIND:
            continue
        if not isinstance(item.get("id"), str) or set(item) != {"type", "id"}:
            raise BadRequest(
                f"input[{at}] is {sorted(item)}: a reference has the fields type and id only",
                param=f"input[{at}]",
            )
        names.append(item["id"])
    return names


def with_references(
    items: list[dict[str, Any]], by_id: Mapping[str, Fields | None]
) -> list[dict[str, Any]]:
    """Return the input with each reference replaced by its item. Raises NotFound."""
    resolved = []
    for at, item in enumerate(items):
        if item.get("type") == KIND:
            if (referenced := by_id[item["id"]]) is None:
                raise NotFound(
                    f"Item with id '{item['id']}' not found. It is no output of this session, or "
                    "its response was sent with `store` set to false: send the whole item instead "
                    "of a reference.",
                    param=f"input[{at}].id",
                )
            resolved.append(referenced)
        else:
            resolved.append(item)
    return resolved


def session_items(
    replies: Iterable[tuple[str, Plain]], names: Iterable[str], request_id: Callable[[str], str]
) -> dict[str, Fields]:
    """Return the named items of a session's replies, which are pairs of the request's id and the
    message, newest first; `request_id` maps a client's id to the one that the session stores.
    """
    turns: dict[str, Plain] = {}
    calls: dict[str, Fields] = {}
    for name, message in replies:
        turns.setdefault(name, message)
        for call in message.get("tool_calls", ()):
            calls.setdefault(call["id"], call["function"])
    items: dict[str, Fields] = {}
    for name in names:
        prefix = name[: name.find("_") + 1]
        rest = name.removeprefix(prefix)
        if prefix in CALLS and rest in calls:
            items[name] = _call_item(rest, calls[rest])
        elif prefix in (REASONING, TEXT):
            if (turn := turns.get(request_id(rest))) is not None:
                made = output_items(rest, turn, ToolNames())
                items |= {item["id"]: item for item in made if item["id"] == name}
            elif prefix == TEXT and request_id(rest.rpartition("_")[0]) in turns:
                # A later text of its turn: the session stores all texts of a turn in the first.
                items[name] = message_item(name, "")
    return items


def _call_item(call_id: str, function: Fields) -> Fields:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolNames().call_item(call_id, function["name"], text, "completed")
