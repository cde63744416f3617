"""Incremental parser of a completion: emitted text is never taken back.

The renderer's own parser alone decides what a completion says. Between markers that may change its
result, text is emitted as it arrives. At a marker the parser runs again, and incomplete text (half
a tag, half a character, a tool call in progress) is held back. The final result is `Renderer.parse`
of the whole completion, and the emitted parts concatenate to it.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from lockstep.render.family import CHANNELLED
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
"""Characters after which an opened `<` cannot be a marker of any format."""
BARE_CALLS = frozenset({"llama-3"})
"""Families whose tool calls are JSON without a marker: text that starts like JSON is held back."""


@dataclass(frozen=True, slots=True)
class MessagePart:
    """New content since the last part; `calls` are complete."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


NOTHING = MessagePart()


class StreamingParser:
    """Parser of one completion: call `feed` with tokens as they arrive, then `finish` once."""

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
        """Create a parser; text that may become one of the stop strings `stops` is held back."""
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
        """Return the content that can be emitted after these tokens."""
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
        """Return the whole message, and the part not emitted yet; `stop` is the stop string, if
        any.

        Raises ContractError if the emitted text is not part of it, because it cannot be taken back.
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
        if token in self._renderer.unshown:
            return NOTHING
        self._ids.append(token)
        if self._held:
            return NOTHING
        if token in self._stops:
            # Parsers read up to here. Anything that follows is decided at the end.
            self._held = True
            return NOTHING
        text = self._decoder.decode(self._renderer.pieces.data(token))
        if self._verbatim:
            self._emitted["content"].append(text)
            return MessagePart(content=text)
        if self._calling:
            # A call closes with a marker, or with text that ends in some bracket.
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
        """Emit the pending text up to `end`; whitespace at its end waits for the following text."""
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
        """Run the parser on all ids so far; `mark` is the text of the marker just read."""
        parsed = self._parse()
        # A marker that the parser removed opens something; the text after it may not be content.
        opens = bool(mark) and mark not in THINKING and not _shown(parsed).endswith(mark)
        if parsed.calls or opens or self._calling:
            # A call inside thinking stops being one if the thinking still ends properly, and
            # without tools nothing is a call.
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
        """Return the channel's text without the part that may still change; that part is the
        flow.
        """
        written = self._renderer.decode(self._ids)
        if self._decoder.getstate()[0]:
            # Half a character: the parser shows a replacement character for it.
            text, written = text.removesuffix(STAND_IN), written.removesuffix(STAND_IN)
        bare = text.rstrip()
        space = text[len(bare) :] or written[len(written.rstrip()) :]
        opened = _opening(bare, max(len(bare) - LONGEST_MARK, 0))
        settled = bare[:opened].rstrip()
        self._flow = (bare + space)[len(settled) :] if bare else ""
        return settled

    def _advance(self, content: str, reasoning: str, calls: tuple[Call, ...]) -> MessagePart:
        """Return what is new in a message, which must begin with the emitted text."""
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
    """Return where a marker may be open, from `start` on; else the end."""
    at = text.find(OPENING, max(start, text.rfind(">") + 1))
    return at if at >= 0 else len(text)


@lru_cache(maxsize=32)
def _holds(renderer: Renderer) -> bool:
    """Return whether text between markers may differ from what it looks like.

    Some tokenizers clean up spaces when decoding, and parsers then read the cleaned text.
    """
    ids = renderer.encode(PROBE)
    tidies = renderer.tokenizer.decode(ids, skip_special_tokens=False) != renderer.decode(ids)
    return renderer.family in CHANNELLED or tidies


@lru_cache(maxsize=32)
def _marks(renderer: Renderer) -> frozenset[int]:
    """Return the tokens that are not plain text: each may change the meaning of the text around
    it.
    """
    added = getattr(renderer.tokenizer, "added_tokens_decoder", {})
    return frozenset(int(token) for token in added)
