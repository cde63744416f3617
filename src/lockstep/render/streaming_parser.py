"""Parses a completion while it is being sampled: what was emitted is never taken back.

The renderer's own parser is the only judge of what a completion says. Between the marks that may
change its verdict, text flows on as it comes; at a mark the parser runs again, and what is still
open (half a tag, half a character, a tool call that is being written) is held back. The end is
`Renderer.parse` of the whole completion, and the emitted parts add up to it.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from lockstep.render.messages import plain_tools
from lockstep.render.parsed_message import Call, ParsedMessage
from lockstep.render.renderer import Renderer
from lockstep.render.stop_cut import HeldTokens
from lockstep.tokens.errors import ContractError

Channel = Literal["content", "reasoning"]
OPENING = "<"
THINKING = ("<think>", "</think>")
PROBE = "a , b . c 's d ?"
STAND_IN = "\ufffd"
LONGEST_MARK = 40
"""Characters after which an opened `<` can be no mark of any format."""
CHANNELLED = frozenset({"gpt-oss", "gemma4", "inkling", "hy3", "deepseek-v4"})
"""Families whose text between marks may be structure: emitted when the completion is whole."""
BARE_CALLS = frozenset({"llama-3"})
"""Families whose tool calls are JSON without any mark: text that opens so is held back."""


@dataclass(frozen=True, slots=True)
class MessagePart:
    """What is new since the last part; `calls` are whole."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


NOTHING = MessagePart()


class StreamingParser:
    """One completion, token by token: `feed` as they come, then `finish` once with all of them."""

    def __init__(
        self,
        renderer: Renderer,
        tools: Sequence[Any] | None,
        prompt_ids: Sequence[int],
        *,
        verbatim: bool = False,
        stops: Sequence[str] = (),
        include_stop: bool = False,
    ) -> None:
        """`stops` are the stop strings of the request: text that may become one is held back."""
        self._stopping = HeldTokens(stops, renderer.pieces.data)
        self._include_stop = include_stop
        self._renderer = renderer
        self._tools = plain_tools(tools)
        self._prompt_ids = prompt_ids
        self._verbatim = verbatim
        self._marks = _marks(renderer)
        self._stops = frozenset(renderer.stop_token_ids)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._ids: list[int] = []
        self._emitted: dict[Channel, list[str]] = {"content": [], "reasoning": []}
        self._calls: tuple[Call, ...] = ()
        self._flow = ""
        """Text of the current channel that was not emitted yet."""
        self._calling = False
        self._channel: Channel = "content"
        self._held = not verbatim and _holds(renderer)
        if not verbatim and not self._held and self._parse().reasoning_complete is False:
            self._channel = "reasoning"

    def feed(self, token_ids: Sequence[int]) -> MessagePart:
        """What can be emitted after these tokens."""
        parts = [self._take(token) for token in self._stopping.feed(token_ids)]
        if len(parts) == 1:
            return parts[0]
        return MessagePart(
            "".join(part.content for part in parts),
            "".join(part.reasoning for part in parts),
            tuple(call for part in parts for call in part.calls),
        )

    def finish(
        self, token_ids: Sequence[int], stop: str | None = None
    ) -> tuple[ParsedMessage, MessagePart]:
        """The whole message, and what of it was not emitted yet; `stop` is what ended it.

        Raises ContractError when what was emitted is no part of it: nothing can be taken back.
        """
        parsed = self._renderer.parse(
            token_ids,
            self._tools,
            prompt_ids=self._prompt_ids,
            verbatim=self._verbatim,
            stop=stop,
            include_stop=self._include_stop,
        )
        content = str(parsed.message()["content"])
        return parsed, self._advance(content, parsed.reasoning or "", parsed.tool_calls)

    def _take(self, token: int) -> MessagePart:
        self._ids.append(token)
        if self._held:
            return NOTHING
        if token in self._stops:
            # Parsers read up to here. What follows, if anything does, is for the end to judge.
            self._held = True
            return NOTHING
        text = self._decoder.decode(self._renderer.pieces.data(token))
        if self._verbatim:
            self._emitted["content"].append(text)
            return MessagePart(content=text)
        if self._calling:
            # A call closes with a mark, or with text that ends in a bracket of some kind.
            closes = token in self._marks or text.rstrip().endswith((">", "]", "}"))
            return self._reparse() if closes else NOTHING
        if token in self._marks:
            return self._reparse(text)
        self._flow += text
        if self._renderer.family in BARE_CALLS and self._opens_bare_call():
            self._held = True
            return NOTHING
        opened = self._flow.find(OPENING)
        if opened < 0:
            return self._emit(len(self._flow))
        if ">" in self._flow[opened:]:
            return self._reparse()
        if len(self._flow) - opened > LONGEST_MARK:
            opened = _opening(self._flow, len(self._flow) - LONGEST_MARK)
        return self._emit(opened)

    def _opens_bare_call(self) -> bool:
        return not any(self._emitted["content"]) and self._flow.lstrip().startswith("{")

    def _emit(self, end: int) -> MessagePart:
        """Emits the flow up to `end`; space at its end waits for what follows."""
        start = 0
        if not any(self._emitted[self._channel]):
            start = len(self._flow) - len(self._flow.lstrip())
        text = self._flow[start:end].rstrip()
        if not text:
            return NOTHING
        self._flow = self._flow[start + len(text) :]
        self._emitted[self._channel].append(text)
        return (
            MessagePart(content=text) if self._channel == "content" else MessagePart(reasoning=text)
        )

    def _reparse(self, mark: str = "") -> MessagePart:
        """Runs the parser on all ids so far; `mark` is the text of a mark just read."""
        parsed = self._parse()
        # A mark that the parser took out opens something; what follows may not be meant to be read.
        opens = bool(mark) and mark not in THINKING and not _shown(parsed).endswith(mark)
        if parsed.calls or opens or self._calling:
            # A call in the middle of thinking stops being one if the thinking still ends properly,
            # and without tools nothing is a call.
            self._held = self._channel == "reasoning" or not self._tools
            if self._held:
                return NOTHING
            self._calling = True
            reasoning = (parsed.reasoning or "").strip()
            return self._advance(parsed.content.strip(), reasoning, parsed.tool_calls)
        self._channel = "reasoning" if parsed.reasoning_complete is False else "content"
        content, reasoning = parsed.content, parsed.reasoning or ""
        if self._channel == "reasoning":
            reasoning = self._settled(reasoning)
        else:
            content = self._settled(content)
        return self._advance(content.strip(), reasoning.strip(), ())

    def _settled(self, text: str) -> str:
        """The channel's text without what may still become something else; that is the flow."""
        written = self._renderer.decode(self._ids)
        if self._decoder.getstate()[0]:
            # Half a character: the parser shows a stand-in for it.
            text, written = text.removesuffix(STAND_IN), written.removesuffix(STAND_IN)
        bare = text.rstrip()
        space = text[len(bare) :] or written[len(written.rstrip()) :]
        opened = _opening(bare, max(len(bare) - LONGEST_MARK, 0))
        kept = bare[:opened].rstrip()
        self._flow = (bare + space)[len(kept) :] if bare else ""
        return kept

    def _advance(self, content: str, reasoning: str, calls: tuple[Call, ...]) -> MessagePart:
        """What is new in a message, which must begin with what was emitted."""
        fresh: dict[Channel, str] = {}
        whole_of: dict[Channel, str] = {"content": content, "reasoning": reasoning}
        for channel, whole in whole_of.items():
            before = "".join(self._emitted[channel])
            if not whole.startswith(before):
                raise ContractError(
                    f"the {channel} that was streamed is no beginning of what the whole "
                    f"completion says: {before[-80:]!r} was sent; send the request without stream"
                )
            fresh[channel] = whole[len(before) :]
            self._emitted[channel] = [whole]
        if calls[: len(self._calls)] != self._calls:
            raise ContractError(
                f"{len(self._calls)} tool calls were streamed that the whole completion "
                "does not begin with; send the request without stream"
            )
        part = MessagePart(fresh["content"], fresh["reasoning"], calls[len(self._calls) :])
        self._calls = calls
        return part

    def _parse(self) -> ParsedMessage:
        return self._renderer.parse_partial(self._ids, self._tools, prompt_ids=self._prompt_ids)


def _shown(parsed: ParsedMessage) -> str:
    return (parsed.reasoning if parsed.reasoning_complete is False else parsed.content) or ""


def _opening(text: str, start: int) -> int:
    """Where a mark may have been opened that is not closed, from `start` on; else the end."""
    at = text.find(OPENING, max(start, text.rfind(">") + 1))
    return at if at >= 0 else len(text)


@lru_cache(maxsize=32)
def _holds(renderer: Renderer) -> bool:
    """Whether text between marks cannot be trusted to be what it looks like.

    Some tokenizers tidy up the spaces of what they decode, which parsers then read.
    """
    ids = renderer.encode(PROBE)
    tidies = renderer.tokenizer.decode(ids, skip_special_tokens=False) != renderer.decode(ids)
    return renderer.family in CHANNELLED or tidies


@lru_cache(maxsize=32)
def _marks(renderer: Renderer) -> frozenset[int]:
    """The tokens that are no plain text: each may change what the text around it is."""
    added = getattr(renderer.tokenizer, "added_tokens_decoder", {})
    return frozenset(int(token) for token in added)
