"""Messages to token ids and back, for one model: its template, its family, its bridge.

The tokenizer's chat template is the truth about a whole conversation. The family, where one writes
exactly what that template writes, parses answers and bridges turns; otherwise the template does
what a template can.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

from lockstep.models import bundled
from lockstep.protocol.common.lazy_ids import PlannedIds
from lockstep.render.bridge import FamilyBridge, TemplateBridge
from lockstep.render.family import find_family, make_family, plain_family, probe_tails
from lockstep.render.fast_tokenizer import FastTokenizer
from lockstep.render.messages import Plain, plain_messages, plain_tools
from lockstep.render.parsed_message import ParsedMessage, parse_message, unparsed_message
from lockstep.render.template import Template
from lockstep.render.token_bytes import TokenBytesTable
from lockstep.tokens.errors import BadRequest, UnknownModel

Thinking = Literal["keep", "template"]
P = ParamSpec("P")
T = TypeVar("T")

THREADS = 4
"""Enough that a long render does not hold up short ones; the interpreter runs one at a time."""


class Renderer:
    """One tokenizer with its chat format. Safe to share between threads and sessions.

    `thinking="keep"` leaves earlier thinking in the prompt, which is what append only means;
    `"template"` drops what the chat template drops, and the ledger records those breaks.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        thinking: Thinking = "keep",
        family: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        model_type: str = "",
        stop_token_ids: Iterable[int] = (),
    ) -> None:
        """`family` names a family of `renderers` and skips the search for it.

        Raises BadRequest when the tokenizer has no chat template and no family was named.
        """
        if thinking not in ("keep", "template"):
            raise BadRequest(
                f"thinking is {thinking!r}, expected 'keep' or 'template'", param="thinking"
            )
        self.tokenizer = tokenizer
        self.thinking: Thinking = thinking
        self.pieces = TokenBytesTable(tokenizer)
        slim = FastTokenizer(tokenizer)
        self.template = Template(slim, template_kwargs)
        if not self.template.source and family is None:
            raise BadRequest(
                "the tokenizer has no chat template; pass family= to name its format",
                param="family",
            )
        self.family = family or find_family(self.template, model_type)
        self._renderer = (
            make_family(slim, self.family, self.template.kwargs, keep_thinking=thinking == "keep")
            if self.family
            else plain_family(self.template)
        )
        self._template_bridge = TemplateBridge(self.template) if self.template.source else None
        self._family_bridge = FamilyBridge(self._renderer) if self._family_bridges() else None
        self.stop_token_ids = self._stop_token_ids(stop_token_ids)
        self._thought_ids = frozenset(
            ids[0]
            for marker in ("<think>", "</think>")
            if len(ids := self.template.encode(marker)) == 1
        )

    @classmethod
    def load(
        cls,
        model: str | os.PathLike[str],
        *,
        thinking: Thinking = "keep",
        family: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Renderer:
        """The renderer of a bundled model, a tokenizer directory or a hub name; made once.

        Raises UnknownModel when there is no tokenizer.
        """
        place = bundled(str(model)) or Path(model)
        where = str(place.resolve()) if place.exists() else str(model)
        kwargs = json.dumps(template_kwargs or {}, sort_keys=True)
        with _LOADING:
            return _load(where, thinking, family, kwargs)

    @property
    def bridge(self) -> str | None:
        """Where the bridge comes from: "family", "template", or None when there is none."""
        if self._family_bridge is not None:
            return "family"
        return "template" if self._template_bridge and self._template_bridge.works else None

    def render(
        self, messages: Iterable[Any], tools: Iterable[Any] | None = None, *, ask: bool = True
    ) -> list[int]:
        """The ids of a whole conversation, by default opened for an answer.

        Raises BadRequest that names the message, or says what the template refused.
        """
        return self.render_plain(plain_messages(messages), plain_tools(tools), ask=ask)

    def render_plain(
        self, messages: list[Plain], tools: list[Plain] | None, *, ask: bool = True
    ) -> list[int]:
        """`render` for messages that `plain_messages` has read already."""
        if self.template.source:
            return self.template.ids(messages, tools, ask=ask)
        return list(self._renderer.render_ids(messages, tools=tools, add_generation_prompt=ask))

    def extend(
        self,
        prompt_ids: list[int],
        completion_ids: list[int],
        messages: list[Plain],
        tools: list[Plain] | None,
        *,
        after_tool: bool = False,
        family_only: bool = False,
    ) -> list[int] | None:
        """What to append to a turn so that the new messages are asked.

        Of the prompt only the part after the turn before is needed: its cost is that of what is
        new, however long the conversation. None when there is no exact way on; none of these ids
        was sampled. `family_only` asks only the family, which with thinking="template" declines
        where the template drops thinking.
        """
        if self._family_bridge is not None:
            extension = self._family_bridge.extend(prompt_ids, completion_ids, messages, tools)
            if extension is not None:
                return extension
        if family_only or self._template_bridge is None:
            return None
        return self._template_bridge.extend(
            completion_ids, messages, stop_ids=self.stop_token_ids, after_tool=after_tool
        )

    def parse(
        self,
        token_ids: Sequence[int],
        tools: Iterable[Any] | None = None,
        *,
        prompt_ids: Sequence[int] = (),
    ) -> ParsedMessage:
        """What the format's parser finds in the sampled ids; `reading.read_completion` is what
        an answer says. The prompt tells whether it opened the thinking already."""
        read = plain_tools(tools)
        # Only its last opening of a turn tells, and that is in what follows the turn before.
        tail = prompt_ids.added if isinstance(prompt_ids, PlannedIds) else list(prompt_ids)
        try:
            parsed = self._renderer.parse_response(
                list(token_ids), tools=read, prompt_ids=tail or None
            )
        except (ValueError, RecursionError):
            # JSON that no reader takes, such as a number of 5,000 digits or 1,000 open brackets.
            ends = self.stop_token_ids
            return unparsed_message(self.decode(t for t in token_ids if t not in ends), prompt_ids)
        return parse_message(parsed, token_ids, read, prompt_ids)

    def thinks(self, token_ids: Iterable[int]) -> bool:
        """Whether the ids hold a mark that opens or closes thinking."""
        return bool(self._thought_ids) and not self._thought_ids.isdisjoint(token_ids)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """The ids of bare text; `special` adds what the tokenizer puts around a prompt."""
        return list(self.template.tokenizer.encode(text, add_special_tokens=special))

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of the ids, special tokens included. Raises BadTokenId for an unknown one."""
        return self.pieces.decode(token_ids)

    async def offload(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs the work on the shared threads, so that the event loop stays free."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(_threads(), functools.partial(work, *args, **kwargs))

    async def render_async(
        self, messages: Iterable[Any], tools: Iterable[Any] | None = None, *, ask: bool = True
    ) -> list[int]:
        return await self.offload(self.render, messages, tools, ask=ask)

    def _family_bridges(self) -> bool:
        """Whether the family's bridge writes what the template writes, where that appends."""
        if not self.family:
            return False
        bridge = FamilyBridge(self._renderer)
        if not self.template.source:
            return True
        for history, answer, new, tools in probe_tails():
            if not self.template.accepts([*history, answer, *new], tools):
                continue
            prompt = self.template.ids(history, tools, ask=True)
            whole = self.template.ids([*history, answer, *new], tools, ask=True)
            closed = self._after_close(whole, len(prompt))
            if whole[: len(prompt)] != prompt or closed is None:
                continue
            extension = bridge.extend(prompt, whole[len(prompt) : closed], new, tools)
            # A family that declines here is asked again on the real turn; a wrong one never is.
            if extension is not None and extension != whole[closed:]:
                return False
        return True

    def _after_close(self, ids: list[int], start: int) -> int | None:
        close = self._template_bridge.close if self._template_bridge else None
        return next((at + 1 for at in range(start, len(ids)) if ids[at] == close), None)

    def _stop_token_ids(self, more: Iterable[int]) -> tuple[int, ...]:
        """The family's, the tokenizer's and the template's: whatever ends an assistant turn."""
        found = [*self._renderer.get_stop_token_ids(), self.tokenizer.eos_token_id]
        if self._template_bridge is not None:
            found.append(self._template_bridge.close)
        return tuple(dict.fromkeys(int(each) for each in (*found, *more) if each is not None))


# Threads that miss the cache at once would each load the tokenizer, and importing transformers in
# several threads at once can fail.
_LOADING = threading.Lock()


@functools.lru_cache(maxsize=32)
def _load(where: str, thinking: Thinking, family: str | None, kwargs: str) -> Renderer:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise BadRequest(
            "loading a tokenizer needs the `transformers` package: pip install transformers"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(where)
    except (OSError, ValueError) as error:
        raise UnknownModel(
            f"no tokenizer at {where!r} ({error}); expected a bundled model, a directory with "
            "tokenizer.json, or a hub name",
            param="model",
        ) from error
    config = _json(Path(where) / "config.json")
    ends = _json(Path(where) / "generation_config.json").get("eos_token_id") or []
    return Renderer(
        tokenizer,
        thinking=thinking,
        family=family,
        template_kwargs=json.loads(kwargs),
        model_type=str(config.get("model_type", "")),
        stop_token_ids=ends if isinstance(ends, list) else [ends],
    )


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.is_file() else {}


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="lockstep-render")
