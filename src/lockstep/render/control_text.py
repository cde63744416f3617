"""Control tokens that messages spell out: they stay text, so that no file can forge a turn.

A tokenizer reads `<|im_end|>` in a chat prompt as the token that ends a turn, whether the template
wrote it or a file that a tool returned. Messages are therefore marked before the template renders
them, and marked text is encoded with a view of the tokenizer in which control tokens have names
that no text contains: the template's own ones are renamed, the others are plain text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from lockstep.render.messages import Plain

_NONCE = secrets.token_hex(8)
MARK = f"\ufdd0{_NONCE}"
"""Inserted into control tokens of messages. Random: a message that contains it would lose it."""
CUT = f"\ufdd2{_NONCE}"
"""Replaces the mark in a token that the model's own merges would make of its text."""


class ControlText:
    """The control tokens of one tokenizer, as strings that messages may spell out."""

    def __init__(self, tokenizer: Any, tokens: Iterable[str]) -> None:
        self.tokens = frozenset(tokens)
        self._tokenizer = tokenizer
        self._pattern = re.compile(_any_of(sorted(self.tokens)) or r"(?!)")
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._renamed: dict[str, str] = {}
        self._merged: list[str] = []
        self._cut: int | None = None
        self._ids: dict[int, int] = {}
        self._view = self._make_view() if self._backend is not None else None

    def mark(self, messages: Sequence[Plain]) -> list[Plain]:
        """Return the messages with a mark in every control token that they spell out."""
        return [self._marked(message) for message in messages]

    def encode(self, text: str) -> list[int]:
        """Return the ids of rendered text in which messages are marked."""
        if self._view is None:
            return self._encode_parts(text)
        renamed = self._pattern.sub(lambda token: self._renamed[token[0]], text)
        for token in self._merged:
            renamed = renamed.replace(_with(MARK, token), _with(CUT, token))
        # The batch form releases the interpreter's lock; the fast form omits offsets.
        (encoded,) = self._view.encode_batch_fast(
            [renamed.replace(MARK, "")], add_special_tokens=False
        )
        return [self._ids.get(token, token) for token in encoded.ids if token != self._cut]

    def _marked(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._pattern.sub(lambda token: _with(MARK, token[0]), value)
        if isinstance(value, dict):
            return {self._marked(key): self._marked(item) for key, item in value.items()}
        return [self._marked(item) for item in value] if isinstance(value, list) else value

    def _make_view(self) -> Any:
        """Create a tokenizer that shares the model, in which control tokens are renamed."""
        from tokenizers import AddedToken, Tokenizer

        backend: Any = self._backend
        view = Tokenizer(backend.model)
        view.normalizer, view.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
        names: dict[str, int] = {}
        added = []
        for token, own in sorted(backend.get_added_tokens_decoder().items()):
            name = own.content
            if name in self.tokens:
                name = self._renamed[own.content] = f"\ufdd1{_NONCE}{token}\ufdd1"
            names[name] = token
            added.append(
                AddedToken(
                    name,
                    single_word=own.single_word,
                    lstrip=own.lstrip,
                    rstrip=own.rstrip,
                    normalized=own.normalized,
                    special=own.special,
                )
            )
        view.add_tokens([*added, AddedToken(CUT, normalized=False)])
        self._cut = view.token_to_id(CUT)
        self._merged = [
            token
            for token in self._renamed
            if backend.token_to_id(token) in view.encode(token, add_special_tokens=False).ids
        ]
        # Tokens whose names are not in the model's vocabulary are numbered anew.
        self._ids = {
            token: names[own.content]
            for token, own in view.get_added_tokens_decoder().items()
            if own.content != CUT and token != names[own.content]
        }
        return view

    def _encode_parts(self, text: str) -> list[int]:
        """Encode with a tokenizer that is not of the `tokenizers` library."""
        ids: list[int] = []
        at = 0
        for token in (*self._pattern.finditer(text), None):
            part = text[at : token.start() if token else None]
            if part:
                ids += self._tokenizer.encode(
                    part.replace(MARK, ""), add_special_tokens=False, split_special_tokens=True
                )
            if token:
                ids.append(self._tokenizer.convert_tokens_to_ids(token[0]))
                at = token.end()
        return ids


def _with(mark: str, token: str) -> str:
    return f"{token[0]}{mark}{token[1:]}"


def _any_of(words: Iterable[str]) -> str:
    """Return a pattern of the words, longest match first, that reads each character once."""
    rests: dict[str, list[str]] = {}
    for word in words:
        rests.setdefault(word[:1], []).append(word[1:])
    ends = rests.pop("", None) is not None
    ways = [re.escape(first) + _any_of(rest) for first, rest in rests.items()]
    return f"(?:{'|'.join((*ways, *[''] * ends))})" if ways else ""
