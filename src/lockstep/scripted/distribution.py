"""The distribution of a scripted worker: derived from hashes, the same each time it is scored.

The tokens before a position and the served weights select a permutation of the vocabulary; the
token in place r then has probability proportional to 1 / (r + 1). This is a real distribution over
all tokens. It changes with every earlier token and with every update, and a token is scored in
constant time.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Container, Iterable
from hashlib import blake2b
from itertools import accumulate

from lockstep.engine.sampler import Sampled
from lockstep.tokens import Ranked

_MASK = (1 << 64) - 1
_PRIMES = (1000003, 1000033, 1000037, 1000039, 1000081, 1000099, 1000117, 1000121)
"""Primes that divide no vocabulary size, so that each defines a permutation."""


class HashedDistribution:
    """Distribution over a vocabulary of `size` tokens, given the state of all earlier tokens."""

    def __init__(self, size: int) -> None:
        self._size = size
        weights = [1.0 / (place + 1) for place in range(size)]
        total = math.fsum(weights)
        self._logprobs = [math.log(weight / total) for weight in weights]
        self._cumulative = list(accumulate(weight / total for weight in weights))

    @staticmethod
    def start(weights: str) -> int:
        """Return the state before the first token, under weights of that name."""
        return int.from_bytes(blake2b(weights.encode(), digest_size=8).digest())

    @staticmethod
    def after(state: int, token_ids: Iterable[int]) -> int:
        """Return the state after these tokens."""
        for token in token_ids:
            state = ((state ^ (token + 1)) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _MASK
            state ^= state >> 29
        return state

    def score_token(self, state: int, token: int, top: int) -> Sampled:
        """Return a token with its logprob, its rank and the `top` most likely tokens."""
        place = self._place(state, token)
        return Sampled(token, self._logprobs[place], place + 1, self.likeliest(state, top))

    def logprobs(self, state: int, token_ids: Iterable[int]) -> list[float]:
        """Return the logprob of each token, given those before it."""
        scores = []
        for token in token_ids:
            scores.append(self._logprobs[self._place(state, token)])
            state = self.after(state, (token,))
        return scores

    def draw(self, state: int, uniform: float, banned: Container[int] = ()) -> int:
        """Return the token that this number in [0, 1) selects, or the next one if banned."""
        place = min(bisect_right(self._cumulative, uniform), self._size - 1)
        for step in range(self._size):
            token = self._token(state, (place + step) % self._size)
            if token not in banned:
                return token
        raise ValueError("every token is banned")

    def likeliest(self, state: int, count: int) -> tuple[Ranked, ...]:
        return tuple(
            Ranked(self._token(state, place), self._logprobs[place], place + 1)
            for place in range(min(count, self._size))
        )

    def _place(self, state: int, token: int) -> int:
        return (_PRIMES[state & 7] * token + (state >> 3)) % self._size

    def _token(self, state: int, place: int) -> int:
        # The inverse of `_place`: multiplication by a prime is a permutation modulo the size.
        inverse = pow(_PRIMES[state & 7], -1, self._size)
        return (place - (state >> 3)) * inverse % self._size
