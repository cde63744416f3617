"""Thinking before constrained text: reasoning models think first, then follow the grammar.

The thinking is part of the grammar, so that a scorer that rebuilds the mask gets the same one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from lockstep.render.messages import Plain
from lockstep.render.renderer import Renderer
from lockstep.tokens.errors import BadRequest
from lockstep.tokens.grammar import THOUGHT_END, Grammar

OPENING = "<think>"
SPACE = r"[ \n\t]{0,20}"
"""Whitespace allowed between the thinking and the rest."""
TAIL = 8
"""Number of last ids of a prompt that contain the end of closed thinking and the space after it."""
Json = dict[str, Any]


def with_thought(renderer: Renderer, prompt_ids: Sequence[int], grammar: Grammar) -> Grammar:
    """Return the grammar preceded by thinking of any length, if the prompt allows thinking.

    Thinking that the prompt opened must end first; thinking that it did not open is optional. The
    grammar is returned unchanged if the chat template has no thinking, if the prompt has closed it,
    and if it describes the whole turn: Lark, free text with tags, tags that already contain
    thinking. Raises BadRequest for a schema that is not JSON.
    """
    form = _whole_format(grammar) if _knows_thoughts(renderer) else None
    if form is None or _closed(renderer, prompt_ids):
        return grammar
    opened = _opened(renderer, prompt_ids)
    thought = {
        "type": "tag",
        "begin": "" if opened else OPENING,
        "content": {"type": "any_text"},
        "end": THOUGHT_END,
    }
    space = {"type": "regex", "pattern": SPACE}
    behind = {"type": "sequence", "elements": [thought, space, form]}
    return tagged(behind if opened else {"type": "or", "elements": [form, behind]})


def tagged(form: Json) -> Grammar:
    """Return the grammar of a structural tag with this format."""
    tag = {"type": "structural_tag", "format": form}
    return Grammar("structural_tag", json.dumps(tag, ensure_ascii=False))


def format_of(grammar: Grammar) -> Json | None:
    """Return a grammar as a format of structural tags; None if it has none.

    Raises BadRequest for a schema that is not JSON.
    """
    match grammar.kind:
        case "json":
            return {"type": "json_schema", "json_schema": _loaded(grammar)}
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "regex":
            return {"type": "regex", "pattern": grammar.text}
        case "choice":
            options = [{"type": "const_string", "value": text} for text in _loaded(grammar)]
            return {"type": "or", "elements": options}
    return None


def _whole_format(grammar: Grammar) -> Json | None:
    """Return the format that must follow thinking; None for a grammar of the whole turn."""
    if grammar.kind != "structural_tag":
        return format_of(grammar)
    tag = _loaded(grammar)
    form = tag.get("format") if isinstance(tag, dict) else None
    if not isinstance(form, dict) or form.get("type") == "triggered_tags" or grammar.has_thought:
        return None
    return form


def _loaded(grammar: Grammar) -> Any:
    try:
        return json.loads(grammar.text)
    except ValueError as error:
        raise BadRequest(
            f"the grammar ({grammar.kind}) is no JSON: {error}", param="structured_outputs"
        ) from None


@lru_cache(maxsize=64)
def _knows_thoughts(renderer: Renderer) -> bool:
    """Return whether the chat format writes thinking with these markers."""
    if renderer.template.source:
        return THOUGHT_END in renderer.template.source
    messages: list[Plain] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hi", "reasoning_content": "Hm"},
    ]
    try:
        ids = renderer.render(messages, add_generation_prompt=False)
    except BadRequest:
        return False
    return THOUGHT_END in renderer.decode(ids)


def _closed(renderer: Renderer, prompt_ids: Sequence[int]) -> bool:
    tail = prompt_ids[max(len(prompt_ids) - TAIL, 0) :]
    return renderer.decode(tail).rstrip().endswith(THOUGHT_END)


def _opened(renderer: Renderer, prompt_ids: Sequence[int]) -> bool:
    """Return whether the prompt ends inside thinking, for parsers of the reply."""
    read = renderer.parse_partial(renderer.encode("x"), None, prompt_ids=prompt_ids)
    return bool(read.reasoning)
