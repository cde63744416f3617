"""Conversion of messages to token ids and back, in the chat format of one model.

The tokenizer's chat template defines the text of a whole conversation. A family that writes exactly
the same parses completions and bridges turns; without one, the template does what a template can.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import threading
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

from lockstep.http.off_loop import LONG_COMPLETION_TOKENS, off_loop
from lockstep.models import bundled
from lockstep.protocol.json.lazy_ids import PlannedIds
from lockstep.render.bridge import FamilyBridge, TemplateBridge
from lockstep.render.control_text import ControlText
from lockstep.render.family import (
    CHANNELLED,
    control_tokens,
    find_family,
    make_family,
    plain_family,
    unshown_tokens,
)
from lockstep.render.fast_tokenizer import FastTokenizer
from lockstep.render.messages import Plain, plain_messages, plain_tools
from lockstep.render.parsed_message import (
    ParsedMessage,
    keep_unparsed,
    not_offered,
    parse_message,
    unparsed_message,
)
from lockstep.render.stop_cut import cut_at_stop, with_tail
from lockstep.render.template import Template
from lockstep.tokens.errors import BadRequest, CustomCode, UnknownModel
from lockstep.tokens.token_bytes import TokenBytesTable

Thinking = Literal["keep", "template"]

NO_TEMPLATE = (
    "this model's tokenizer has no chat template, so messages cannot be rendered: put the template "
    "it was trained with beside its tokenizer.json as chat_template.jinja, or send text or ids "
    "instead of messages (/v1/completions, /inference/v1/generate)"
)


class Renderer:
    """One tokenizer with its chat format. Safe to share between threads and sessions.

        renderer = Renderer.load("tiny")
        ids = renderer.render([{"role": "user", "content": "Reverse: 40213"}])

    `thinking="keep"` leaves earlier thinking in the prompt, which keeps prompts append-only;
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
        control_tokens_in_text: bool = False,
    ) -> None:
        """Create a renderer; `family` names a family of `renderers` and skips the search for it.

        Control tokens that messages spell out are encoded as text, so that no file can forge a
        turn; with `control_tokens_in_text` they are control tokens, as in other servers.

        A tokenizer without a chat template encodes and decodes text, and renders no messages unless
        its family is named.
        """
        if thinking not in ("keep", "template"):
            raise BadRequest(
                f"thinking is {thinking!r}, expected 'keep' or 'template'", param="thinking"
            )
        self.tokenizer = tokenizer
        self.thinking: Thinking = thinking
        self.pieces = TokenBytesTable(tokenizer)
        fast = FastTokenizer(tokenizer)
        self.template = Template(fast, template_kwargs)
        self.family = family or find_family(self.template, model_type)
        self._renderer = (
            make_family(fast, self.family, self.template.kwargs, keep_thinking=thinking == "keep")
            if self.family
            else plain_family(self.template)
        )
        if not control_tokens_in_text:
            control = ControlText(tokenizer, control_tokens(self.template))
            self.template.control = fast.control = control
        self.control_tokens_in_text = control_tokens_in_text
        self._template_bridge = TemplateBridge(self.template) if self.template.source else None
        self._family_bridge = self._make_family_bridge()
        self.stop_token_ids = self._stop_token_ids(stop_token_ids)
        # The format's own parser cuts at the end tokens it knows; the others are handled here.
        self._other_ends = frozenset(self.stop_token_ids) - set(self._renderer.get_stop_token_ids())
        self.unshown: frozenset[int] = frozenset()
        """Control tokens that no message shows where they were sampled."""
        if self.family not in CHANNELLED:
            unshown = unshown_tokens(self.template, self._renderer)
            self.unshown = unshown - set(self.stop_token_ids)
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
        control_tokens_in_text: bool = False,
    ) -> Renderer:
        """Return the renderer of a bundled model, a tokenizer directory or a hub name; cached.

        Raises UnknownModel without a tokenizer.
        """
        place = bundled(str(model)) or Path(model)
        where = str(place.resolve()) if place.exists() else str(model)
        kwargs = json.dumps(template_kwargs or {}, sort_keys=True)
        with _LOADING:
            return _load(where, thinking, family, kwargs, control_tokens_in_text)

    @property
    def bridge(self) -> str | None:
        """Source of the bridge: "family", "template", or None without one."""
        if self._family_bridge is not None:
            return "family"
        return "template" if self._template_bridge and self._template_bridge.works else None

    def render(
        self,
        messages: Iterable[Any],
        tools: Iterable[Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Return the ids of a whole conversation, by default opened for the assistant's turn.

        Raises BadRequest that names the message, or says what the template rejected or that there
        is none.
        """
        return self.render_plain(
            plain_messages(messages),
            plain_tools(tools),
            add_generation_prompt=add_generation_prompt,
        )

    def render_plain(
        self,
        messages: list[Plain],
        tools: list[Plain] | None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Render messages that `plain_messages` has already read."""
        if self.template.source:
            return self.template.ids(messages, tools, add_generation_prompt=add_generation_prompt)
        if self.family is None:
            raise BadRequest(NO_TEMPLATE, param="messages")
        return list(
            self._renderer.render_ids(
                self.template.mark(messages),
                tools=tools,
                add_generation_prompt=add_generation_prompt,
            )
        )

    def extend(
        self,
        prompt_ids: list[int],
        completion_ids: list[int],
        messages: list[Plain],
        tools: list[Plain] | None,
        *,
        system: Sequence[Plain] = (),
        after_tool: bool = False,
        family_only: bool = False,
    ) -> list[int] | None:
        """Return the ids to append to a turn so that the new messages follow it.

        Only the part of the prompt after the previous turn is needed, so the cost depends on what
        is new, not on the length of the conversation. None if there is no exact continuation; none
        of these ids was sampled. `system` are the system messages that opened the conversation,
        which some templates repeat with every user message. `family_only` tries the family only,
        which with thinking="template" declines where the template drops thinking.
        """
        if self._family_bridge is not None and messages:
            marked = list(self.template.mark(messages))
            extension = self._family_bridge.extend(prompt_ids, completion_ids, marked, tools)
            if extension is not None:
                return extension
        if family_only or self._template_bridge is None:
            return None
        return self._template_bridge.extend(
            completion_ids,
            messages,
            tools,
            system=system,
            stop_ids=self.stop_token_ids,
            after_tool=after_tool,
        )

    def parse(
        self,
        token_ids: Sequence[int],
        tools: Iterable[Any] | None = None,
        *,
        prompt_ids: Sequence[int] = (),
        verbatim: bool = False,
        stop: str | None = None,
        include_stop: bool = False,
    ) -> ParsedMessage:
        """Return the message of sampled ids, without the whitespace around its parts.

        Client and gateway, whole and streamed responses all end here. Nothing is lost: everything
        that is not part of a parsed call is content. Without `tools` nothing is a call. The prompt
        tells whether it already opened the thinking. Control tokens that mean nothing inside a turn
        are left out. `verbatim` takes everything as content,
        including whitespace: the rest of a message that the client began. `stop` is the stop string
        that the last token completed: the text ends before it, or after it with `include_stop`.
        """
        if stop is not None:
            cut = cut_at_stop(token_ids, stop, self.pieces.data, include=include_stop)
            if cut is not None:
                message = self.parse(cut.ids, tools, prompt_ids=prompt_ids, verbatim=verbatim)
                if verbatim:
                    return replace(message, content=message.content + cut.text)
                return with_tail(message, self.decode(cut.ids), cut.text)
        token_ids = self._shown(token_ids)
        if verbatim:
            return ParsedMessage(self.decode(self._before_stop(token_ids)))
        specs = plain_tools(tools)
        message = self.parse_partial(token_ids, specs, prompt_ids=prompt_ids)
        if message.calls:
            if not specs:
                message = replace(message, calls=tuple(map(not_offered, message.calls)))
            message = keep_unparsed(message, self._before_stop(token_ids), self.decode)
        reasoning = (message.reasoning or "").strip() or None
        return replace(
            message,
            content=message.content.strip(),
            reasoning=reasoning,
            calls=message.calls if specs else (),
        )

    async def parse_async(
        self,
        token_ids: Sequence[int],
        tools: Sequence[Any] | None = None,
        *,
        prompt_ids: Sequence[int] = (),
        verbatim: bool = False,
        stop: str | None = None,
        include_stop: bool = False,
    ) -> ParsedMessage:
        """Parse as `parse` does, a long completion off the event loop."""
        options: dict[str, Any] = {"verbatim": verbatim, "stop": stop, "include_stop": include_stop}
        large = len(token_ids) >= LONG_COMPLETION_TOKENS
        return await off_loop(large, self.parse, token_ids, tools, prompt_ids=prompt_ids, **options)

    def parse_partial(
        self, token_ids: Sequence[int], tools: list[Plain] | None, *, prompt_ids: Sequence[int]
    ) -> ParsedMessage:
        """Return the format's own parse of ids that may be incomplete, including whitespace.

        Calls are listed even without tools. For the streaming parser, which must know what is open.
        """
        # Only the last opening of a turn matters, and it is in the ids after the previous turn.
        tail = prompt_ids.added if isinstance(prompt_ids, PlannedIds) else list(prompt_ids)
        token_ids = self._shown(token_ids)
        if self._other_ends:
            token_ids = _before(token_ids, self._other_ends)
        try:
            parsed = self._renderer.parse_response(
                list(token_ids), tools=tools, prompt_ids=tail or None
            )
        except (ValueError, RecursionError):
            # JSON that no parser accepts, such as a number of 5,000 digits or 1,000 open brackets.
            ends = self.stop_token_ids
            return unparsed_message(self.decode(t for t in token_ids if t not in ends), prompt_ids)
        return parse_message(parsed, token_ids, tools, prompt_ids)

    def _shown(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return the ids without the control tokens that mean nothing where they were sampled."""
        if self.unshown.isdisjoint(token_ids):
            return token_ids
        return [token for token in token_ids if token not in self.unshown]

    def _before_stop(self, token_ids: Sequence[int]) -> list[int]:
        return _before(token_ids, self.stop_token_ids)

    def thinks(self, token_ids: Iterable[int]) -> bool:
        """Return whether the ids contain a marker that opens or closes thinking."""
        return bool(self._thought_ids) and not self._thought_ids.isdisjoint(token_ids)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of bare text; `special` adds the tokenizer's own prefix and suffix."""
        return list(self.template.tokenizer.encode(text, add_special_tokens=special))

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of the ids, including special tokens; ids without a token add none."""
        return self.pieces.decode(token_ids)

    async def render_async(
        self,
        messages: Iterable[Any],
        tools: Iterable[Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        return await off_loop(
            True, self.render, messages, tools, add_generation_prompt=add_generation_prompt
        )

    async def tokenizer_digest(self) -> bytes:
        """Return a digest of the tokenizer's vocabulary, which says what token ids mean."""
        digest = _DIGESTS.get(self.tokenizer)
        return await off_loop(True, self._make_digest) if digest is None else digest

    def _make_digest(self) -> bytes:
        # Under a lock: the first requests of a gateway come together, and a large vocabulary takes
        # a good part of a second.
        with _DIGESTING:
            if (digest := _DIGESTS.get(self.tokenizer)) is None:
                vocabulary = sorted(self.tokenizer.get_vocab().items())
                digest = blake2b(repr(vocabulary).encode(), digest_size=16).digest()
                _DIGESTS[self.tokenizer] = digest
            return digest

    def _make_family_bridge(self) -> FamilyBridge | None:
        """Return the family's bridge if it writes the same as the template."""
        if not self.family:
            return None
        bridge = FamilyBridge(self._renderer)
        close = self._template_bridge.close if self._template_bridge else None
        return bridge if bridge.agrees_with(self.template, close) else None

    def _stop_token_ids(self, more: Iterable[int]) -> tuple[int, ...]:
        """Return the ids that end an assistant turn: the family's, the tokenizer's, the
        template's.
        """
        ends = [*self._renderer.get_stop_token_ids(), self.tokenizer.eos_token_id]
        if self._template_bridge is not None:
            ends.append(self._template_bridge.close)
        return tuple(dict.fromkeys(int(token) for token in (*ends, *more) if token is not None))


def _before(token_ids: Sequence[int], ends: Container[int]) -> list[int]:
    """Return the ids before the first that ends a turn."""
    return list(itertools.takewhile(lambda token: token not in ends, token_ids))


# Threads that miss the cache at once would each load the tokenizer, and importing transformers in
# several threads at once can fail.
_LOADING = threading.Lock()
_DIGESTING = threading.Lock()
_DIGESTS: WeakKeyDictionary[Any, bytes] = WeakKeyDictionary()


@functools.lru_cache(maxsize=32)
def _load(
    where: str,
    thinking: Thinking,
    family: str | None,
    kwargs: str,
    control_tokens_in_text: bool,
) -> Renderer:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise BadRequest(
            "loading a tokenizer needs the `transformers` package: pip install transformers"
        ) from error
    try:
        # By default, the library would ask on the terminal whether to run a model's own code.
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False)
    except (OSError, ValueError) as error:
        if "custom code" in str(error):
            raise CustomCode(
                f"the tokenizer of {where!r} asks for Python code of its own, which is never run: "
                "take auto_map out of its tokenizer_config.json and set tokenizer_class to "
                "PreTrainedTokenizerFast, which reads its tokenizer.json",
                param="model",
            ) from error
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
        control_tokens_in_text=control_tokens_in_text,
    )


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.is_file() else {}
