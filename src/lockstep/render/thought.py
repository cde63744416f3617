"""A thought before what a grammar demands: models that think do so first, and then keep to it.

The thought is part of the grammar, so that whoever rebuilds its mask rebuilds the same one.
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
"""What may stand between a thought and the rest."""
TAIL = 8
"""The last ids of a prompt, which hold the end of a closed thought and the space behind it."""
Json = dict[str, Any]


def with_thought(renderer: Renderer, prompt_ids: Sequence[int], grammar: Grammar) -> Grammar:
    """The grammar behind a thought of any length, where the prompt leaves room for one.

    A thought that the prompt opened must end first, one that it did not open may be left out.
    The same grammar comes back where the chat template knows no thoughts, where the prompt has
    closed it, and for what speaks of the whole turn: Lark, free text with tags, tags that hold a
    thought already. Raises BadRequest for a schema that is no JSON.
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
    """The grammar of a structural tag with this format."""
    tag = {"type": "structural_tag", "format": form}
    return Grammar("structural_tag", json.dumps(tag, ensure_ascii=False))


def format_of(grammar: Grammar) -> Json | None:
    """A grammar as a format of structural tags; None for one that has none.

    Raises BadRequest for a schema that is no JSON.
    """
    match grammar.kind:
        case "json":
            return {"type": "json_schema", "json_schema": _loaded(grammar)}
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "regex":
            return {"type": "regex", "pattern": grammar.text}
        case "choice":
            options = [{"type": "const_string", "value": each} for each in _loaded(grammar)]
            return {"type": "or", "elements": options}
    return None


def _whole_format(grammar: Grammar) -> Json | None:
    """What must follow a thought; None for a grammar that speaks of the whole turn."""
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
    """Whether the chat format has thoughts that are written with these marks."""
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
    """Whether the prompt ends within a thought, for those who will read the reply."""
    read = renderer.parse_partial(renderer.encode("x"), None, prompt_ids=prompt_ids)
    return bool(read.reasoning)
