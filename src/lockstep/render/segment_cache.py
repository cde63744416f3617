"""Cache for encoding long texts segment by segment: known text between markers is not re-encoded.

A tokenizer splits a text at its added tokens first and encodes the parts separately. A chat with
one new message therefore costs only that message. If a tokenizer works differently, there are no
segments.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import OrderedDict
from threading import Lock
from typing import Any

KEPT = 16 << 20
"""Cached characters of text, least recently used first out: about 100 chats of 32k tokens."""
PER_SEGMENT = 100
"""Overhead of a segment besides its text, for the accounting only."""
NORMALIZERS = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Replace", "Sequence"})
PRE_TOKENIZERS = frozenset({"ByteLevel", "Digits", "Split", "Sequence"})
"""Pre-tokenizers that treat every segment alike, wherever it is in the text."""


class SegmentCache:
    """Ids of texts by segment. Safe to share between threads."""

    def __init__(self, backend: Any, marks: dict[str, int]) -> None:
        self._backend = backend
        self._marks = marks
        # If two markers begin alike, the longer one matches, as in the tokenizer.
        longest_first = sorted(marks, key=len, reverse=True)
        self._cut = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        self._known: OrderedDict[str, array[int]] = OrderedDict()
        self._size = 0
        self._lock = Lock()

    @classmethod
    def of(cls, backend: Any) -> SegmentCache | None:
        """Create the cache of a `tokenizers` tokenizer; None if its texts cannot be split."""
        added = backend.get_added_tokens_decoder()
        marks = {token.content: at for at, token in added.items() if not token.normalized}
        plain = not any(
            token.lstrip or token.rstrip or token.single_word
            for token in added.values()
            if not token.normalized
        )
        cuts = (
            plain
            and marks
            and backend.truncation is None
            and backend.padding is None
            and not backend.encode_special_tokens
            and _kinds(backend.normalizer) <= NORMALIZERS
            and _kinds(backend.pre_tokenizer) <= PRE_TOKENIZERS
        )
        return cls(backend, marks) if cuts else None

    def encode(self, text: str) -> list[int]:
        """Return the ids of the text, without the tokenizer's own prefix and suffix."""
        parts = self._cut.split(text)
        cached = self._look_up(parts[::2])
        ids: list[int] = []
        for at, part in enumerate(parts):
            if at % 2:
                ids.append(self._marks[part])
            elif part:
                ids += cached[part]
        return ids

    def _look_up(self, texts: list[str]) -> dict[str, array[int]]:
        known_ids: dict[str, array[int]] = {}
        missing: list[str] = []
        with self._lock:
            for text in dict.fromkeys(texts):
                if (ids := self._known.get(text)) is not None:
                    self._known.move_to_end(text)
                    known_ids[text] = ids
                elif text:
                    missing.append(text)
        if missing:
            # The batch form releases the interpreter's lock; the fast form omits offsets.
            encoded = self._backend.encode_batch_fast(missing, add_special_tokens=False)
            new = {
                text: array("i", encoding.ids)
                for text, encoding in zip(missing, encoded, strict=True)
            }
            self._keep(new)
            known_ids |= new
        return known_ids

    def _keep(self, new: dict[str, array[int]]) -> None:
        with self._lock:
            for text, ids in new.items():
                if text not in self._known:
                    self._known[text] = ids
                    self._size += len(text) + PER_SEGMENT
            while self._size > KEPT:
                oldest, _ = self._known.popitem(last=False)
                self._size -= len(oldest) + PER_SEGMENT


def _kinds(part: Any) -> set[str]:
    """Return the component types of a normalizer or pre-tokenizer."""
    if part is None:
        return set()
    waiting, kinds = [json.loads(part.__getstate__())], set()
    while waiting:
        described = waiting.pop()
        kinds.add(str(described.get("type")))
        waiting += described.get("normalizers", ()) or described.get("pretokenizers", ())
    return kinds
