"""Text: the server's own text routes compared with the client's renderer."""

from __future__ import annotations

from typing import Any

from lockstep.check.outcome import NotApplicable, require
from lockstep.check.raw import RawReply
from lockstep.check.row import RowGroup
from lockstep.check.target import Target
from lockstep.render import Renderer

GROUP = RowGroup("text")
TEXTS = ("Hello, world", "  two  spaces\n", "héllo 你好 😀 🧑\u200d🚀", "x = [1, 2]; y=x[0]")
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "What is 2 + 2? 😀"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3 + 3?"},
]


def renderer_of(target: Target) -> Renderer:
    if target.renderer is None:
        raise NotApplicable("no tokenizer was given to compare with (--tokenizer)")
    return target.renderer


def there(reply: RawReply, route: str) -> RawReply:
    """Return the reply of a route. Raises NotApplicable if the route does not exist."""
    if reply.missing:
        raise NotApplicable(f"the server has no {route} ({reply.status})")
    return reply


def parted(theirs: Any, ours: list[int]) -> str:
    if not isinstance(theirs, list):
        return "no ids came"
    pairs = zip(theirs, ours, strict=False)
    least = min(len(theirs), len(ours))
    at = next((at for at, (a, b) in enumerate(pairs) if a != b), least)
    return (
        f"{len(theirs)} ids instead of {len(ours)}, parted at {at}: {theirs[at : at + 4]} instead "
        f"of {ours[at : at + 4]}"
    )


@GROUP.row("tokenize", "the server tokenizes text as the client does", "F40 F41")
async def tokenize(target: Target) -> str:
    count = 0
    for text in TEXTS:
        body = {"model": target.card.id, "prompt": text, "add_special_tokens": False}
        reply = there(await target.post("/tokenize", body), "/tokenize")
        ours = renderer_of(target).encode(text)
        theirs = reply.fields.get("tokens")
        require(theirs == ours, f"{text!r}: {reply.describe()}, {parted(theirs, ours)}")
        count += len(ours)
    return f"{len(TEXTS)} texts, {count} ids, all the same"


@GROUP.row("template", "the server renders a conversation as the client does", "L2 F41")
async def template(target: Target) -> str:
    body = {"model": target.card.id, "messages": CHAT}
    reply = there(await target.post("/tokenize", body), "/tokenize")
    ours = renderer_of(target).render(CHAT)
    theirs = reply.fields.get("tokens")
    require(theirs == ours, f"{len(CHAT)} messages: {reply.describe()}, {parted(theirs, ours)}")
    return f"{len(CHAT)} messages: {len(ours)} ids, all the same"


@GROUP.row("chat", "a chat request uses the prompt ids that the client renders", "L2")
async def chat(target: Target) -> str:
    body: dict[str, Any] = {"model": target.card.id, "messages": CHAT, "max_tokens": 1}
    body |= target.dialect.chat_ids_option
    reply = there(await target.post("/v1/chat/completions", body), "/v1/chat/completions")
    ours = renderer_of(target).render(CHAT)
    nested = reply.fields.get("nvext") or {}
    theirs = nested.get("prompt_token_ids") or reply.fields.get("prompt_token_ids")
    require(theirs == ours, f"{len(CHAT)} messages: {reply.describe()}, {parted(theirs, ours)}")
    return f"{len(CHAT)} messages: the prompt has the same {len(ours)} ids"


@GROUP.row("detokenize", "an unknown id is rejected, not decoded to nothing", "F39")
async def detokenize(target: Target) -> str:
    body = {"model": target.card.id, "tokens": [999_999_999]}
    reply = there(await target.post("/detokenize", body), "/detokenize")
    text = reply.fields.get("prompt")
    require(reply.refused, f"id 999999999: {reply.describe()}, text {text!r}")
    return f"id 999999999: {reply.describe()}"
