"""Reads which harness sent a request, for which of its agents, and whether it is a side call.

The headers and wordings are those that each harness was observed to send; see "Lineage" in
docs/agents.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request

from lockstep.ledger.origin import Origin, Side

OPEN_END = frozenset({"claude-code", "codex", "opencode", "qwen-code"})
"""Harnesses that continue or retry after a stream without an end. An event with an error ends some
of their runs; an SDK without a harness needs it, as it would take what it received for all."""
LONGEST = 200
"""Characters of an id or a name; the rest is cut, so that headers cannot fill sessions."""
SUMMARY_WORDS: dict[str, tuple[tuple[str, Side], ...]] = {
    "claude-code": (("CRITICAL: Respond with ", "compaction"),),
    "qwen-code": (
        ("First, reason in your <analysis> block.", "compaction"),
        ("Managed memory has ", "memory"),
    ),
}
"""Beginnings of the last message of a side call, by harness."""
SUMMARY_ENDS: dict[str, tuple[tuple[str, Side], ...]] = {
    "qwen-code": (("block. Then, produce the <state_snapshot> XML.", "compaction"),),
}
"""Ends of that message, for harnesses that append the instruction to the main line's history."""
SYSTEM_WORDS: dict[str, tuple[tuple[str, Side], ...]] = {
    "opencode": (("You are a context summar", "compaction"), ("You are a title ", "other")),
}
"""Beginnings of the system prompt of a side call."""


class _CodexTurn(msgspec.Struct):
    request_kind: str = "turn"
    forked_from_thread_id: str | None = None


_CODEX_TURN = msgspec.json.Decoder(_CodexTurn)


def origin_of(http: Request, messages: Any) -> Origin:
    """Return the origin of a request with these messages."""
    headers = http.headers
    agent = headers.get("user-agent", "")
    if "x-codex-window-id" in headers or "x-codex-turn-metadata" in headers:
        return _codex(headers)
    if (session := headers.get("x-claude-code-session-id")) is not None:
        child = headers.get("x-claude-code-agent-id")
        above = headers.get("x-claude-code-parent-agent-id", session)
        harness, own, parent = "claude-code", child or session, above if child else ""
    elif agent.startswith("opencode/"):
        harness, own = "opencode", headers.get("x-session-affinity", "")
        parent = headers.get("x-parent-session-id", "")
    elif agent.startswith(("QwenCode/", "claude-cli/")):
        # Claude Code sends its session header; on the Messages route Qwen Code has its user agent.
        harness, own, parent = "qwen-code", "", ""
    elif agent.startswith("Agents/Python"):
        harness, own, parent = "openai-agents", "", ""
    else:
        # An SDK's product, such as OpenAI/Python: its version is not part of the name.
        harness, own, parent = agent.partition(" ")[0], "", ""
        if harness.count("/") == 1 and harness[-1:].isdigit():
            harness = harness.partition("/")[0]
    side, evidence = _side(harness, messages)
    return Origin(
        harness=harness[:LONGEST],
        agent=own[:LONGEST],
        parent=parent[:LONGEST],
        side=side,
        side_evidence=evidence,
        retries=_count(headers.get("x-stainless-retry-count", "")),
    )


def _codex(headers: Mapping[str, str]) -> Origin:
    try:
        turn = _CODEX_TURN.decode(headers.get("x-codex-turn-metadata", "{}"))
    except (msgspec.DecodeError, msgspec.ValidationError):
        turn = _CodexTurn()
    side: Side = ""
    if turn.request_kind != "turn":
        side = "compaction" if turn.request_kind == "compaction" else "other"
    return Origin(
        harness="codex",
        agent=headers.get("thread-id", "")[:LONGEST],
        parent=headers.get("x-codex-parent-thread-id", "")[:LONGEST],
        forked_from=(turn.forked_from_thread_id or "")[:LONGEST],
        window=headers.get("x-codex-window-id", "")[:LONGEST],
        side=side,
        side_evidence=f"request_kind {turn.request_kind[:LONGEST]}" if side else "",
    )


def _side(harness: str, messages: Any) -> tuple[Side, str]:
    if not isinstance(messages, list) or not messages:
        return "", ""
    for words, at in ((SUMMARY_WORDS, -1), (SYSTEM_WORDS, 0)):
        for start, side in words.get(harness, ()):
            if _last_text(messages[at]).startswith(start):
                return side, f"it begins with {start.strip()!r}"
    for end, side in SUMMARY_ENDS.get(harness, ()):
        if _last_text(messages[-1]).rstrip().endswith(end):
            return side, f"it ends with {end!r}"
    return "", ""


def _last_text(message: Any) -> str:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list) and content and isinstance(content[-1], dict):
        content = content[-1].get("text")
    return content if isinstance(content, str) else ""


def _count(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 4 else 0
