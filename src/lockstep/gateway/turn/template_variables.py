"""Renderers for the chat template variables that requests set, made once and cached."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from functools import lru_cache
from typing import Any

from lockstep.http.off_loop import off_loop
from lockstep.protocol.openai.chat_request import ChatRequest
from lockstep.render import Renderer
from lockstep.tokens.errors import BadRequest, UnsupportedField

CACHED_RENDERERS = 32
"""Most renderers in memory: clients choose the values, so their number needs a limit."""
OWN_FIELDS = ("add_generation_prompt", "continue_final_message", "reasoning_effort", "verbosity")
RESERVED = ("messages", "conversation", "tools", "documents", "chat_template", "tokenize",
            "return_dict", "return_tensors", "padding", "truncation", "max_length")  # fmt: skip


class RendererVariants:
    """Copies of the model's renderer with other template variables; the oldest are dropped."""

    def __init__(self) -> None:
        self._renderers: OrderedDict[str, Renderer] = OrderedDict()

    async def get(self, chat: ChatRequest, base: Renderer) -> Renderer:
        """Return `base` with the template variables of a request.

        Raises BadRequest for variables that contradict a field, and UnsupportedField for those that
        the model's template does not have.
        """
        kwargs = variables(chat, base.template.source)
        if not kwargs:
            return base
        # The values may be any JSON: their text is the key of the cache.
        key = json.dumps(kwargs, sort_keys=True)
        renderer = self._renderers.get(key)
        if renderer is None:
            renderer = await off_loop(True, _with_variables, base, kwargs)
            self._renderers[key] = renderer
            if len(self._renderers) > CACHED_RENDERERS:
                self._renderers.popitem(last=False)
        self._renderers.move_to_end(key)
        return renderer


@lru_cache(maxsize=CACHED_RENDERERS)
def takes_inner_system(renderer: Renderer) -> bool:
    """Return whether the chat template accepts a system message after the first message."""
    roles = ("user", "system", "assistant", "user")
    return renderer.template.accepts([{"role": role, "content": "text"} for role in roles], None)


def variables(chat: ChatRequest, source: str) -> dict[str, Any]:
    """Return the template variables that a request sets. Raises as `RendererVariants.get`."""
    kwargs = dict(chat.chat_template_kwargs or {})
    for name in OWN_FIELDS:
        if name not in kwargs:
            continue
        value, field = kwargs.pop(name), getattr(chat, name)
        if name == "add_generation_prompt":
            field = field is not False
        elif name == "continue_final_message":
            field = bool(field)
        elif field is None:
            # The field is not set, so this is a template variable like any other.
            kwargs[name] = field = value
        if value != field:
            raise BadRequest(
                f"chat_template_kwargs.{name} is {value!r}, but the field {name} is {field!r}: "
                "give it in one place",
                param=f"chat_template_kwargs.{name}",
            )
    if chat.reasoning_effort is not None:
        kwargs |= _effort(chat.reasoning_effort, kwargs, source)
    if chat.verbosity is not None:
        kwargs |= _verbosity(chat.verbosity, source)
    for name in kwargs:
        if name in RESERVED:
            raise BadRequest(
                f"chat_template_kwargs.{name} is not a template variable that may be set: use the "
                "field of the request",
                param=f"chat_template_kwargs.{name}",
            )
        if not _mentions(source, name):
            raise UnsupportedField(
                f"chat_template_kwargs.{name} has no effect: the chat template of this model has "
                "no such variable; leave it out",
                param=f"chat_template_kwargs.{name}",
            )
    return kwargs


def _effort(effort: str, kwargs: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the variables that set a reasoning effort in this template."""
    if _mentions(source, "reasoning_effort"):
        return {"reasoning_effort": effort}
    if effort == "none" and _mentions(source, "enable_thinking"):
        if kwargs.get("enable_thinking", False) is not False:
            raise BadRequest(
                "reasoning_effort is 'none', but chat_template_kwargs.enable_thinking is "
                f"{kwargs['enable_thinking']!r}",
                param="reasoning_effort",
            )
        return {"enable_thinking": False}
    raise UnsupportedField(
        f"reasoning_effort is {effort!r}, but the chat template of this model has no variable for "
        "it: leave it out",
        param="reasoning_effort",
    )


def _verbosity(verbosity: str, source: str) -> dict[str, Any]:
    if _mentions(source, "verbosity"):
        return {"verbosity": verbosity}
    if verbosity == "medium":
        return {}  # OpenAI's default
    raise UnsupportedField(
        f"verbosity is {verbosity!r}, but the chat template of this model has no variable for it: "
        "leave it out",
        param="verbosity",
    )


def _mentions(source: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", source) is not None


def _with_variables(base: Renderer, kwargs: dict[str, Any]) -> Renderer:
    try:
        return Renderer(
            base.tokenizer,
            thinking=base.thinking,
            family=base.family,
            template_kwargs={**base.template.kwargs, **kwargs},
            stop_token_ids=base.stop_token_ids,
            control_tokens_in_text=base.control_tokens_in_text,
        )
    except ValueError as error:
        # The variable exists, but the chat format rejects this value.
        why = " ".join(line.strip() for line in str(error).splitlines()[:3])
        raise BadRequest(
            f"chat_template_kwargs cannot be used: {why}", param="chat_template_kwargs"
        ) from error
