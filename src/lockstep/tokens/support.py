"""The support of sampled tokens: the set of tokens that each one was drawn from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import msgspec
import numpy as np
import numpy.typing as npt

from lockstep.tokens.errors import BadSupport
from lockstep.tokens.experts import Buffer

Ints = npt.NDArray[np.integer]
Bools = npt.NDArray[np.bool_]
ROW = np.dtype("<i4")
WORD = np.dtype("<u4")
ANY_VOCAB = 2**31 - 1
"""Vocabulary size for sets of a server that does not report its own. All sets are lists of ids."""
SupportRow = tuple[int, bytes]
"""The size of one set and its words."""


@dataclass(frozen=True, slots=True)
class Support:
    """One set of token ids per token, mask as bytes until the sets are needed.

    `counts` are the sizes of the sets as 32-bit integers. A set of `vocab` tokens is the whole
    vocabulary, and 0 means that none was recorded, as for prompt tokens. `data` has the words of
    all sets, 32 bits each: the ids in ascending order, or the ids that are missing, or a bitmap of
    the vocabulary, whichever is smallest (ids before bitmap before missing ids). Raises BadSupport
    if the sizes do not match.
    """

    counts: Buffer
    data: Buffer
    vocab: int

    def __post_init__(self) -> None:
        if not 1 <= self.vocab <= ANY_VOCAB:
            raise BadSupport(f"the support has vocabulary size {self.vocab}")
        for name, size in (
            ("counts", memoryview(self.counts).nbytes), ("data", memoryview(self.data).nbytes)
        ):  # fmt: skip
            if size % 4:
                raise BadSupport(f"the {name} of a support have {size} bytes, no multiple of 4")
        sizes = self.sizes()
        if sizes.size and not 0 <= int(sizes.min()) <= int(sizes.max()) <= self.vocab:
            raise BadSupport(f"a set has a size outside 0 to {self.vocab}, the vocabulary")
        expected = int(self._word_counts().sum())
        if expected * 4 != memoryview(self.data).nbytes:
            raise BadSupport(
                f"sets of these sizes take {expected * 4} bytes, but "
                f"{memoryview(self.data).nbytes} came"
            )

    @classmethod
    def of_rows(cls, rows: Iterable[SupportRow], vocab: int) -> Support:
        """Return the support of rows made by `support_row`."""
        counts, words = [], []
        for count, data in rows:
            counts.append(count)
            words.append(data)
        return cls(np.array(counts, dtype=ROW).tobytes(), b"".join(words), vocab)

    @classmethod
    def of_ids(cls, sets: Iterable[Sequence[int]], vocab: int = ANY_VOCAB) -> Support:
        """Return the support of lists of ids; an empty list is the whole vocabulary."""
        return cls.of_rows((_ids_row(ids, vocab) for ids in sets), vocab)

    @classmethod
    def unrecorded(cls, rows: int, vocab: int) -> Support:
        """Return `rows` rows without a recorded set."""
        return cls(bytes(4 * rows), b"", vocab)

    @classmethod
    def join(cls, parts: Sequence[Support]) -> Support:
        """Return the rows of all parts, in order."""
        vocab = max((part.vocab for part in parts), default=1)
        parts = [part.for_vocab(vocab) for part in parts]
        return cls(
            b"".join(part.counts for part in parts), b"".join(part.data for part in parts), vocab
        )

    @classmethod
    def placed(cls, parts: Sequence[tuple[int, Support]], rows: int) -> Support | None:
        """Return `rows` rows with the parts at their starts, in order; None without a part."""
        if not parts:
            return None
        vocab = max(own.vocab for _, own in parts)
        pieces, at = [], 0
        for start, own in parts:
            pieces += [cls.unrecorded(start - at, vocab), own]
            at = start + own.rows
        return cls.join([*pieces, cls.unrecorded(rows - at, vocab)])

    @property
    def rows(self) -> int:
        return memoryview(self.counts).nbytes // 4

    @property
    def nbytes(self) -> int:
        return memoryview(self.counts).nbytes + memoryview(self.data).nbytes

    def sizes(self) -> Ints:
        """Return the sizes of the sets, as an array that shares the bytes."""
        return np.frombuffer(self.counts, dtype=ROW)

    def recorded(self) -> Bools:
        """Return which rows have a recorded set."""
        return self.sizes() > 0

    def for_vocab(self, vocab: int) -> Support:
        """Return the same sets with another vocabulary size."""
        if vocab == self.vocab:
            return self
        rows: list[SupportRow] = []
        for at, count in enumerate(self.sizes().tolist()):
            ids = self.ids(at)
            whole = ids is None and count > 0
            rows.append((vocab if whole else 0, b"") if ids is None else _ids_row(ids, vocab))
        return Support.of_rows(rows, vocab)

    def slice(self, start: int, end: int) -> Support:
        """Return the rows [start, end), without a copy."""
        words = self._word_counts()
        first = int(words[:start].sum())
        last = first + int(words[start:end].sum())
        data = memoryview(self.data).cast("B")[4 * first : 4 * last]
        counts = memoryview(self.counts).cast("B")[4 * start : 4 * end]
        return Support(counts, data, self.vocab)

    def ids(self, row: int) -> Ints | None:
        """Return the ids of a set in ascending order; None for the whole vocabulary, or if no set
        was recorded.
        """
        words = self._word_counts()
        first = int(words[:row].sum())
        return self._set(int(self.sizes()[row]), self._words()[first : first + int(words[row])])

    def lists(self) -> list[list[int]]:
        """Return the ids of every set; an empty list is the whole vocabulary, or not recorded."""
        return [[] if ids is None else ids.tolist() for ids in self._sets()]

    def keep(self, width: int) -> Bools:
        """Return the sets as rows of a mask over `width` logits, of shape (rows, width).

        Raises BadSupport for a row without a recorded set, and for ids outside the logits.
        """
        if not self.recorded().all():
            at = int(np.flatnonzero(~self.recorded())[0])
            raise BadSupport(f"no support was recorded for row {at}")
        mask = np.zeros((self.rows, width), dtype=bool)
        for at, ids in enumerate(self._sets()):
            if ids is None:
                mask[at] = True
                continue
            if int(ids[-1]) >= width:
                raise BadSupport(f"row {at} contains token {ids[-1]}, but there are {width} logits")
            mask[at, ids] = True
        return mask

    def check_contains(self, token_ids: Sequence[int], name: str = "token ids") -> None:
        """Raise BadSupport unless there is a row per token, and each recorded set contains it."""
        if self.rows != len(token_ids):
            raise BadSupport(f"{len(token_ids)} {name} but {self.rows} sets of their support")
        for at, (token, ids) in enumerate(zip(token_ids, self._sets(), strict=True)):
            if ids is None:
                continue
            place = int(ids.searchsorted(token))
            if place == len(ids) or ids[place] != token:
                raise BadSupport(
                    f"token {token} at position {at} is not in its own support of {len(ids)} tokens"
                )

    def _words(self) -> Ints:
        return np.frombuffer(self.data, dtype=WORD)

    def _word_counts(self) -> Ints:
        sizes = self.sizes().astype(np.int64)
        bitmap = (self.vocab + 31) // 32
        words = np.minimum(np.minimum(sizes, self.vocab - sizes), bitmap)
        return np.where(sizes == 0, 0, words)

    def _sets(self) -> Iterable[Ints | None]:
        words = self._words()
        ends = [0, *np.cumsum(self._word_counts()).tolist()]
        for count, (start, end) in zip(self.sizes().tolist(), pairwise(ends), strict=True):
            yield self._set(count, words[start:end])

    def _set(self, count: int, words: Ints) -> Ints | None:
        if count in (0, self.vocab):
            return None
        form = _form(count, self.vocab)
        if form == "ids":
            return words
        if form == "missing":
            whole = np.ones(self.vocab, dtype=bool)
            whole[words] = False
            return np.flatnonzero(whole)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=self.vocab)
        return np.flatnonzero(bits)


class PackedSupport(msgspec.Struct):
    """A `Support` in JSON: the vocabulary size, and base64 of its bytes."""

    vocab: int
    counts: bytes
    data: bytes

    @classmethod
    def of(cls, support: Support) -> PackedSupport:
        # Any buffer can be encoded; decoding gives bytes.
        return cls(support.vocab, cast(bytes, support.counts), cast(bytes, support.data))

    def value(self) -> Support:
        """Return the support. Raises BadSupport if the sizes do not match."""
        return Support(self.counts, self.data, self.vocab)


def support_row(mask: Bools) -> SupportRow:
    """Return the row of a set, given whether each token of the vocabulary is in it."""
    count, vocab = int(np.count_nonzero(mask)), len(mask)
    if count in (0, vocab):
        return count, b""
    form = _form(count, vocab)
    if form == "bitmap":
        packed = np.packbits(mask, bitorder="little").tobytes()
        return count, packed.ljust((vocab + 31) // 32 * 4, b"\0")
    return count, np.flatnonzero(mask if form == "ids" else ~mask).astype(WORD).tobytes()


def _form(count: int, vocab: int) -> str:
    bitmap = (vocab + 31) // 32
    if count <= min(vocab - count, bitmap):
        return "ids"
    return "bitmap" if bitmap <= vocab - count else "missing"


def _ids_row(ids: Sequence[int] | Ints, vocab: int) -> SupportRow:
    """Return the row of a set of ids in ascending order. Raises BadSupport for other ids."""
    if not len(ids):
        return vocab, b""
    array = np.asarray(ids, dtype=np.int64)
    if array[0] < 0 or array[-1] >= vocab or not (array[1:] > array[:-1]).all():
        raise BadSupport(
            f"a set of {len(array)} ids is not ascending and within a vocabulary of {vocab}"
        )
    if _form(len(array), vocab) == "ids":
        return len(array), array.astype(WORD).tobytes()
    mask = np.zeros(vocab, dtype=bool)
    mask[array] = True
    return support_row(mask)
