"""Detection of the `renderers` family that writes a tokenizer's chat format token for token.

`renderers` identifies models by their exact names. Here a family is identified by its output: it
must reproduce the tokenizer's own chat template on a handful of conversations. This finds fine-
tunes and renamed models, and rejects look-alikes with another template.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.render.messages import Plain
from lockstep.render.template import Template
from lockstep.tokens.errors import BadRequest

log = logging.getLogger(__name__)

TAG = re.compile(r"</?(?:think|tools?|tool_\w+|arg_\w+|function\w*|parameter\w*)>")
"""Tokens that structure the inside of a turn, such as thinking and calls."""
NOT_FAMILIES = ("auto", "custom", "default")
KEEPS_THINKING = "all"
CHANNELLED = frozenset({"gpt-oss", "gemma4", "inkling", "hy3", "deepseek-v4"})
"""Families whose text between markers may be structure: any control token may mean something."""

TOOL: Plain = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Finds a word.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
_USER: Plain = {"role": "user", "content": "What is 2 + 2?"}
_MORE: Plain = {"role": "user", "content": "And 3 + 3?"}
_REPLY: Plain = {"role": "assistant", "content": "It is 4."}
_THOUGHT: Plain = {**_REPLY, "reasoning_content": "Two and two."}
_CALL: Plain = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "a1b2c3d4e",
            "type": "function",
            "function": {
                "name": "look_up",
                "arguments": {"word": "four", "limit": 2, "exact": True, "in": ["a", {"b": None}]},
            },
        }
    ],
}
_RESULT: Plain = {"role": "tool", "tool_call_id": "a1b2c3d4e", "content": "4"}

PROBES: tuple[tuple[list[Plain], list[Plain] | None, bool], ...] = (
    ([_USER], None, True),
    ([{"role": "system", "content": "Be brief."}, _USER], None, True),
    ([_USER, _REPLY], None, False),
    ([_USER, _REPLY, _MORE], None, True),
    ([_USER, _THOUGHT, _MORE], None, True),
    ([_USER], [TOOL], True),
    ([_USER, _CALL, _RESULT], [TOOL], True),
    ([_USER, _CALL, _RESULT, _REPLY, _MORE], [TOOL], True),
)
"""Conversations (messages, tools, add_generation_prompt) that distinguish families."""


def find_family(template: Template, hint: str = "") -> str | None:
    """Return the name of the family that writes the same as the template, or None.

    A family that contains `hint` (a model type such as "qwen3") is tried first.
    """
    expected = [(probe, ids) for probe in PROBES if (ids := _template_ids(template, probe))]
    if not expected:
        return None
    flat = hint.replace("_", "").replace("-", "").lower()
    names = sorted(
        config_classes(), key=lambda name: (not flat or name.replace("-", "") not in flat, name)
    )
    for name in names:
        renderer = _attempt(template.tokenizer, name, template.kwargs)
        if renderer is not None and all(_writes(renderer, probe, ids) for probe, ids in expected):
            return name
    return None


def control_tokens(template: Template) -> list[str]:
    """Return the tokens that no message may bring: special ones, and those that the template writes
    around messages. Tags inside a turn are none.
    """
    written = {token for probe in PROBES for token in _template_ids(template, probe) or ()}
    return [
        token.content
        for number, token in getattr(template.tokenizer, "added_tokens_decoder", {}).items()
        if len(token.content.strip()) > 1  # some vocabularies add runs of line breaks
        and (token.special or number in written)
        and not TAG.fullmatch(token.content)
    ]


def unshown_tokens(template: Template, renderer: Any) -> frozenset[int]:
    """Return the control tokens that mean nothing inside a completion, where one may sample them.

    Not those that a template writes for calls or that its parser knows: they are structure.
    """
    plain, others = (
        {
            token
            for probe in PROBES
            if (probe[1] is None) is without_tools
            for token in _template_ids(template, probe) or ()
        }
        for without_tools in (True, False)
    )
    markers = {value for value in vars(renderer).values() if isinstance(value, int)}
    convert = template.tokenizer.convert_tokens_to_ids
    ids = {convert(token) for token in control_tokens(template)}
    return frozenset(ids - ((others | markers) - plain))


def make_family(
    tokenizer: Any, name: str, kwargs: Mapping[str, Any], *, keep_thinking: bool
) -> Any:
    """Create the renderer of the named family, with the template variables it supports.

    Raises BadRequest for a name that `renderers` does not have.
    """
    import renderers

    classes = config_classes()
    if name not in classes:
        raise BadRequest(
            f"family is {name!r}, expected one of {', '.join(sorted(classes))}", param="family"
        )
    config = classes[name]
    fields = {key: value for key, value in kwargs.items() if key in config.model_fields}
    if keep_thinking:
        fields["thinking_retention"] = KEEPS_THINKING
    return renderers.create_renderer(tokenizer, config(**fields))


def plain_family(template: Template) -> Any:
    """Create the renderer for a template without a family: it parses but does not bridge."""
    import renderers
    from renderers import parsers

    from lockstep.render.mistral_calls import MARK, MistralToolParser  # imports `renderers`

    source = template.source
    parser: str | None
    if "<｜tool▁calls▁begin｜>" in source:
        parser = "deepseek-v3"
    elif "<arg_key>" in source:
        parser = "glm"
    elif "<function=" in source:
        parser = "qwen3.5"
    elif MARK in source and "[ARGS]" not in source:  # with [ARGS], calls have another form
        parser = "mistral"
        parsers.TOOL_PARSERS.setdefault(parser, MistralToolParser)
    else:
        parser = "qwen3" if "<tool_call>" in source else None
    config = renderers.DefaultRendererConfig(tool_parser=parser, reasoning_parser="think")
    return renderers.create_renderer(template.tokenizer, config)


def config_classes() -> dict[str, Any]:
    """Return the families of `renderers`, each with its typed config."""
    try:
        from renderers import configs
    except ImportError as error:
        raise BadRequest(
            "rendering chat messages needs the `renderers` package: pip install renderers"
        ) from error

    base: Any = configs.BaseRendererConfig
    families: dict[str, Any] = {}
    for value in vars(configs).values():
        if isinstance(value, type) and issubclass(value, base):
            fields: dict[str, Any] = getattr(value, "model_fields", {})
            if "name" in fields and isinstance(fields["name"].default, str):
                families[fields["name"].default] = value
    return {name: value for name, value in families.items() if name not in NOT_FAMILIES}


def _template_ids(
    template: Template, probe: tuple[list[Plain], list[Plain] | None, bool]
) -> list[int] | None:
    messages, tools, add_generation_prompt = probe
    try:
        return template.ids(messages, tools, add_generation_prompt=add_generation_prompt)
    except BadRequest:
        return None  # not every template accepts tools or a system message


def _attempt(tokenizer: Any, name: str, kwargs: Mapping[str, Any]) -> Any:
    try:
        return make_family(tokenizer, name, kwargs, keep_thinking=False)
    except Exception:
        # A family rejects a tokenizer without its special tokens, each with another exception.
        log.debug("family %s does not take this tokenizer", name, exc_info=True)
        return None


def _writes(
    renderer: Any, probe: tuple[list[Plain], list[Plain] | None, bool], expected: list[int]
) -> bool:
    messages, tools, add_generation_prompt = probe
    try:
        ids = renderer.render_ids(
            messages, tools=tools, add_generation_prompt=add_generation_prompt
        )
    except Exception:
        log.debug("%s cannot render a probe", type(renderer).__name__, exc_info=True)
        return False
    return list(ids) == expected


def probe_tails() -> Iterator[tuple[list[Plain], Plain, list[Plain], list[Plain] | None]]:
    """Yield turns to verify a bridge on: history, reply, new messages, tools."""
    yield [_USER], _REPLY, [_MORE], None
    yield [_USER, _REPLY, _MORE], _REPLY, [_USER], None
    yield [_USER], _CALL, [_RESULT], [TOOL]
    yield [_USER, _CALL, _RESULT], _REPLY, [_MORE], [TOOL]
