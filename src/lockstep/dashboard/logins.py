"""Logins to the dashboard: a cookie in exchange for the admin token or a code made with it."""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable

from lockstep.tokens.errors import Unauthorized

COOKIE_SECONDS = 12 * 3600.0
CODE_SECONDS = 300.0
MOST_CODES = 64


class Logins:
    """Cookies and codes of one process, which end with it.

    A cookie names a login and its expiry on the monotonic clock, which no change of the date moves,
    and is signed. A code is valid for one login shortly after it was made: unlike the token it may
    be part of an address that others can read later.
    """

    def __init__(self, token: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._token = token.encode()
        self._clock = clock
        self._key = secrets.token_bytes(32)
        self._codes: dict[str, float] = {}
        self._ended: dict[str, float] = {}

    def new_code(self) -> str:
        """Return a code that is exchanged for one cookie within `CODE_SECONDS`."""
        now = self._clock()
        self._codes = {code: until for code, until in self._codes.items() if until > now}
        while len(self._codes) >= MOST_CODES:
            del self._codes[next(iter(self._codes))]
        code = secrets.token_urlsafe(32)
        self._codes[code] = now + CODE_SECONDS
        return code

    def begin(self, *, token: str | None = None, code: str | None = None) -> str:
        """Return the cookie of a new login. Raises Unauthorized for a wrong token, or a code that
        is unknown, used or expired.
        """
        if token is not None:
            if not hmac.compare_digest(token.encode(), self._token):
                raise Unauthorized("this is not the admin token", param="token")
        elif self._codes.pop(code or "", 0.0) <= self._clock():
            raise Unauthorized(
                "this link was used or has expired: run `lockstep dashboard` for a new one",
                param="code",
            )
        named = f"{secrets.token_urlsafe(12)}.{int(self._clock() + COOKIE_SECONDS)}"
        return f"{named}.{self._signature(named)}"

    def is_valid(self, cookie: str) -> bool:
        """Return whether a cookie was made here, has not expired, and was not logged out."""
        named, _, signature = cookie.rpartition(".")
        if not hmac.compare_digest(signature.encode(), self._signature(named).encode()):
            return False
        login, _, until = named.partition(".")
        return float(until) > self._clock() and login not in self._ended

    def end(self, cookie: str) -> None:
        """Log out: copies of the cookie are invalid from now on."""
        if not self.is_valid(cookie):
            return
        now = self._clock()
        self._ended = {login: until for login, until in self._ended.items() if until > now}
        login, until, _ = cookie.split(".")
        self._ended[login] = float(until)

    def _signature(self, named: str) -> str:
        return hmac.new(self._key, named.encode(), "sha256").hexdigest()
