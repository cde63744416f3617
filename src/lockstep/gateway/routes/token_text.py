"""The text of a completion in /v1/completions, and logprobs keyed by token strings.

Strings must not lose what ids tell apart: bytes that are not a whole character are spelt out, and
of two tokens with the same string the second is named by its id.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from functools import lru_cache

from lockstep.protocol.common.prompt_logprobs import PromptField, encode_prompt_logprobs
from lockstep.protocol.common.response import TOKEN_PREFIX
from lockstep.protocol.openai.completions import LegacyLogprobs
from lockstep.render import Renderer
from lockstep.tokens import PromptLogprob, Ranked
from lockstep.tokens.stop_strings import HeldText


class TokenSpelling:
    """The spelling of tokens: text or `token_id:N`, with or without special tokens."""

    def __init__(self, renderer: Renderer, *, as_ids: bool, keep_special: bool) -> None:
        self._renderer = renderer
        self._as_ids = as_ids
        self._skipped = frozenset() if keep_special else special_ids(renderer)

    def name(self, token: int) -> str:
        """Return the string of a token; ids that only pad the vocabulary are named by their id."""
        if self._as_ids:
            return f"{TOKEN_PREFIX}{token}"
        return self.decoded(token) or f"{TOKEN_PREFIX}{token}"

    def decoded(self, token: int) -> str | None:
        """Return the text of a token; None for an id that only pads the vocabulary."""
        pieces = self._renderer.pieces
        return pieces.piece(token).text if token in pieces else None

    def data(self, token: int) -> bytes:
        """Return the bytes that a sampled token adds to the text."""
        return b"" if token in self._skipped else self._renderer.pieces.data(token)

    def prompt_data(self, ids: Sequence[int], text: str | None) -> list[bytes]:
        """Return the bytes that each prompt token adds to the echo.

        `text` is the prompt, if it was sent as text; tokens that the tokenizer added to it get no
        bytes.
        """
        pieces = [self._renderer.pieces.data(token) for token in ids]
        if text is None or b"".join(pieces).decode(errors="replace") == text:
            return pieces
        # The tokenizer added tokens (BOS, say): the text's own ids are searched in the prompt.
        plain = self._renderer.encode(text)
        for start in range(len(ids) - len(plain) + 1):
            if list(ids[start : start + len(plain)]) == plain:
                end = start + len(plain)
                return [data if start <= at < end else b"" for at, data in enumerate(pieces)]
        return pieces

    def tops(self, own: tuple[int, float], others: Iterable[Ranked]) -> dict[str, float]:
        """Return the logprobs of a token and of its alternatives by their strings."""
        logprobs = {self.name(own[0]): own[1]}
        for other in others:
            if other.token_id == own[0]:
                continue
            name = self.name(other.token_id)
            if name in logprobs:
                name = f"{TOKEN_PREFIX}{other.token_id}"
            logprobs[name] = other.logprob
        return logprobs

    def prompt_field(self, prompt: Sequence[PromptLogprob | None] | None) -> PromptField | None:
        """Return the prompt's logprobs with the text of each token."""
        return encode_prompt_logprobs(prompt, self.decoded)


class CompletionText:
    """The growing text of one choice, and the offset of each token in it.

    Text that may become one of `stops` is held back. The tokens of a stop string stay among the
    logprobs, although the text ends before it (after it with `include_stop`).
    """

    def __init__(
        self, spelling: TokenSpelling, stops: Sequence[str] = (), *, include_stop: bool = False
    ) -> None:
        self._held = HeldText(stops)
        self._include_stop = include_stop
        self._spelling = spelling
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._length = 0
        self._fresh: list[str] = []
        self._logprobs = LegacyLogprobs([], [], [], [])

    def add_prompt(
        self,
        ids: Sequence[int],
        pieces: Sequence[bytes],
        logprobs: Sequence[PromptLogprob | None] | None,
    ) -> None:
        """Add the echo of a prompt, whose first token has no logprob."""
        entries = logprobs if logprobs is not None else [None] * len(ids)
        for token, data, entry in zip(ids, pieces, entries, strict=True):
            if entry is None:
                text = self._add(token, data, None, None)
            else:
                own = (entry.token_id, entry.logprob)
                text = self._add(token, data, entry.logprob, self._spelling.tops(own, entry.top))
            self._fresh.append(text)

    def add(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        tops: Sequence[tuple[Ranked, ...]] | None = None,
    ) -> None:
        """Add sampled tokens with their logprobs and alternatives."""
        for at, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            others = tops[at] if tops is not None else ()
            alternatives = self._spelling.tops((token, logprob), others)
            text = self._add(token, self._spelling.data(token), logprob, alternatives)
            self._fresh.append(self._held.feed(text))

    def take(self) -> tuple[str, LegacyLogprobs]:
        """Return text and logprobs since the last call; an incomplete character is held back."""
        text, logprobs = "".join(self._fresh), self._logprobs
        self._fresh, self._logprobs = [], LegacyLogprobs([], [], [], [])
        return text, logprobs

    def end(self, stop: str | None) -> tuple[str, LegacyLogprobs]:
        """Return the rest after the last token; `stop` is the stop string that ended it, if any."""
        self._fresh.append(self._held.feed(self._decoder.decode(b"", True)))
        self._fresh.append(self._held.finish(stop, include=self._include_stop))
        return self.take()

    def _add(
        self, token: int, data: bytes, logprob: float | None, tops: dict[str, float] | None
    ) -> str:
        new = self._logprobs
        new.text_offset.append(self._length)
        new.token_logprobs.append(logprob)
        new.tokens.append(self._spelling.name(token))
        new.top_logprobs.append(tops)
        text = self._decoder.decode(data)
        self._length += len(text)
        return text


@lru_cache(maxsize=64)
def special_ids(renderer: Renderer) -> frozenset[int]:
    """Return the special tokens, which mark up a prompt and are not part of the text."""
    added = getattr(renderer.tokenizer, "added_tokens_decoder", {})
    special = (int(at) for at, token in added.items() if getattr(token, "special", True))
    return frozenset((*special, *getattr(renderer.tokenizer, "all_special_ids", ())))
