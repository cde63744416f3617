"""A tokenizer view that only produces ids: no offsets, no attribution, no mutable state.

`renderers` accepts any tokenizer with a few methods. Without character offsets it writes the same
ids in a third of the time, and many threads may use the Rust tokenizer underneath.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from lockstep.render.control_text import MARK, ControlText
from lockstep.render.segment_cache import SegmentCache

SHORT = 48
"""Texts up to this length are cached: role headers, separators and markers occur all the time."""

LONG = 4000
"""Minimum number of characters for which a lookup by segments pays off."""


class FastTokenizer:
    """The ids-only view of a tokenizer; every other attribute is the tokenizer's own."""

    def __init__(self, tokenizer: Any) -> None:
        self._own = tokenizer
        self.control: ControlText | None = None
        """Encodes the text of marked messages."""
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._segments = SegmentCache.of(self._backend) if self._backend is not None else None
        self._short = lru_cache(maxsize=1024)(self._encode)
        # Families look up the ids of the same few markers in every turn.
        if hasattr(tokenizer, "convert_tokens_to_ids"):
            self._mark = lru_cache(maxsize=1024)(tokenizer.convert_tokens_to_ids)
            self.convert_tokens_to_ids = self._ids_of_marks
        if hasattr(tokenizer, "unk_token_id"):
            self.unk_token_id = tokenizer.unk_token_id

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        if args or kwargs != {"add_special_tokens": False}:
            return list(self._own.encode(text, *args, **kwargs))
        return list(self._short(text) if len(text) <= SHORT else self._encode(text))

    def _encode(self, text: str) -> list[int]:
        if self.control is not None and MARK in text:
            return self.control.encode(text)
        if self._backend is None:
            return list(self._own.encode(text, add_special_tokens=False))
        if len(text) > LONG and self._segments is not None:
            return self._segments.encode(text)
        # The batch form releases the interpreter's lock; the fast form omits offsets.
        (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return list(encoded.ids)

    def _ids_of_marks(self, tokens: str | list[str]) -> Any:
        if isinstance(tokens, str):
            return self._mark(tokens)
        return self._own.convert_tokens_to_ids(tokens)

    def __getattr__(self, name: str) -> Any:
        # A callable tokenizer would signal that it has offsets.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._own, name)
