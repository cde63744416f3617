"""Requests suspected of ending the workers that they are sent to."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from time import monotonic

import msgspec

from lockstep.backends.transport import GenerateRequest
from lockstep.tokens.errors import BadRequest

MOST_DEATHS = 2
"""Workers that may die with a request on them, before it is no longer sent."""
REFUSED_SECONDS = 300.0
REMEMBERED = 1024


class Suspects:
    """Digests of requests that were alone on a worker when it died.

    After the second death, the same request is refused for five minutes: sent again by its client,
    it would end one worker after the other.
    """

    def __init__(self, seconds: float = REFUSED_SECONDS) -> None:
        self._seconds = seconds
        self._deaths: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    def check(self, request: GenerateRequest | None) -> None:
        """Raise BadRequest for a request that has ended two workers."""
        if request is None or not self._deaths:
            return  # no digest is computed while no worker has died
        digest = _digest(request)
        deaths, since = self._deaths.get(digest, (0, 0.0))
        rest = since + self._seconds - monotonic()
        if rest <= 0:
            self._deaths.pop(digest, None)
        elif deaths >= MOST_DEATHS:
            raise BadRequest(
                f"this request was the only one on {deaths} workers when they died: it is refused "
                f"for another {rest:.0f} s; change it, or report it",
                retry_after=rest,
            )

    def add(self, request: GenerateRequest | None) -> None:
        """Count a worker that died with this request as the only one on it."""
        if request is None:
            return
        digest = _digest(request)
        deaths, since = self._deaths.pop(digest, (0, 0.0))
        if monotonic() - since > self._seconds:
            deaths = 0
        self._deaths[digest] = (deaths + 1, monotonic())
        while len(self._deaths) > REMEMBERED:
            self._deaths.popitem(last=False)


def _digest(request: GenerateRequest) -> bytes:
    """Return a digest of what the engine computes: not of the request's id or its cache salt."""
    content = [request.model, list(request.prompt_ids), request.sampling]
    return blake2b(msgspec.json.encode(content), digest_size=16).digest()
