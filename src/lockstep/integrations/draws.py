"""DrawnRows that a trainer will learn from, found again by the tokens of a row.

TRL and Tinker pass a row's tokens and logprobs to the trainer, but not what it was drawn from.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from threading import Lock

import numpy as np

from lockstep.tokens import Completion, Sample
from lockstep.tokens.errors import BadSupport
from lockstep.tokens.shaping import UNSHAPED, ShapedSpan
from lockstep.tokens.support import Support

MOST_BYTES = 512 * 2**20
MOST_DRAWS = 200_000
"""Requests that are remembered, without their sets about 100 MB."""


@dataclass(frozen=True, slots=True)
class DrawnSpan:
    """The tokens of one request in a row: their options, and the sets that they were drawn from."""

    span: ShapedSpan
    support: Support | None

    @property
    def nbytes(self) -> int:
        return 0 if self.support is None else self.support.nbytes


class DrawnRows:
    """The distributions that rows were drawn from, with up to `most_bytes` of sets.

    Past that, the oldest are dropped, and looking them up is an error. True once a distribution was
    shaped by more than the temperature. Can be used from several threads.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._draws: OrderedDict[bytes, DrawnSpan | None] = OrderedDict()
        self._lengths: set[int] = set()
        self._bytes = 0
        self._most_bytes = most_bytes
        self._lock = Lock()
        self._shaped = False

    def __bool__(self) -> bool:
        return self._shaped

    def add(self, drawn: Completion | Sample) -> None:
        """Remember what a completion or the turns of a sample were drawn from."""
        if isinstance(drawn, Sample):
            for span in drawn.shaping:
                own = None if drawn.support is None else drawn.support.slice(span.start, span.end)
                self._put(drawn.token_ids[: span.end], DrawnSpan(span, own))
            if not drawn.shaping:
                end = len(drawn.token_ids)
                self._put(drawn.token_ids, DrawnSpan(ShapedSpan(end, end, UNSHAPED), None))
        else:
            ids = [*drawn.prompt_ids, *drawn.token_ids]
            span = ShapedSpan(len(drawn.prompt_ids), len(ids), drawn.shaping or UNSHAPED)
            self._put(ids, DrawnSpan(span, drawn.support))

    def find(self, token_ids: Sequence[int]) -> list[DrawnSpan]:
        """Return the draws in a row, in order. Raises BadSupport for one that was dropped."""
        array = np.asarray(token_ids, dtype=np.int64)
        digest, at = blake2b(digest_size=16), 0
        draws: list[DrawnSpan] = []
        with self._lock:
            for end in sorted(length for length in self._lengths if length <= len(array)):
                digest.update(array[at:end].tobytes())
                at = end
                if (key := digest.digest()) not in self._draws:
                    continue
                if (draw := self._draws[key]) is None:
                    raise BadSupport(
                        f"the sets that {end} tokens were drawn from were dropped: more than "
                        f"{self._most_bytes // 2**20} MiB of newer ones came; train on samples "
                        "sooner, or sample without truncation"
                    )
                draws.append(draw)
        return draws

    def _put(self, token_ids: Sequence[int], draw: DrawnSpan) -> None:
        key = blake2b(np.asarray(token_ids, dtype=np.int64).tobytes(), digest_size=16).digest()
        with self._lock:
            before = self._draws.get(key)
            if before is not None and before.span.shaping == UNSHAPED:
                return  # the same tokens were also drawn from the whole distribution
            self._draws.pop(key, None)
            self._bytes += draw.nbytes - (0 if before is None else before.nbytes)
            self._draws[key] = draw
            self._lengths.add(len(token_ids))
            self._shaped |= draw.span.shaping != UNSHAPED
            for oldest, dropped in self._draws.items():
                if self._bytes <= self._most_bytes:
                    break
                if dropped is not None:
                    self._bytes -= dropped.nbytes
                    self._draws[oldest] = None
            while len(self._draws) > MOST_DRAWS:
                self._draws.popitem(last=False)


def support_of(draws: Sequence[DrawnSpan], tokens: int) -> Support | None:
    """Return the sets of a row of `tokens` tokens; None if none was recorded."""
    return Support.placed(
        [(own.span.start, own.support) for own in draws if own.support is not None], tokens
    )


def check_recorded(drawn: Completion | Sample) -> None:
    """Raise BadSupport for tokens of a restricted distribution whose sets were not recorded."""
    if isinstance(drawn, Sample):
        absent = drawn.support_absent
    else:
        restricts = drawn.shaping is not None and drawn.shaping.restricts
        absent = restricts and drawn.support is None
    if absent:
        raise BadSupport(
            "tokens were drawn from a part of the vocabulary, but the workers did not record which "
            "(support: absent), so that every ratio would be biased: sample without top_p, top_k, "
            "min_p and grammars, or use workers that record the sets (Lockstep's do; vLLM with "
            "--return-sampling-mask and a top_k)"
        )
