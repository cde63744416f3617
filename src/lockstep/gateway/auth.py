"""Access to a gateway: the admin token of the control plane, the API keys of the data plane."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from lockstep.gateway.callers import Caller, Scopes
from lockstep.gateway.sessions.keys import PREFIX
from lockstep.gateway.sessions.sessions import Sessions
from lockstep.http.auth import RequestAuth, key_digests
from lockstep.http.handlers import json_response, require_bearer
from lockstep.http.route_templates import UNKNOWN, RouteTemplates
from lockstep.protocol.common.error_body import error_fields
from lockstep.storage.api_keys import DEFAULT_TENANT, StoredKey
from lockstep.storage.key_file import KeyFile
from lockstep.storage.protocols import KeyStore
from lockstep.tokens.errors import Forbidden, LockstepError, Unauthorized

log = logging.getLogger(__name__)
SESSION_KEY = PREFIX.encode()
FREE_GUESSES, GUESS_SECONDS, GUESS_DELAY_SECONDS = 20, 60.0, 1.0
"""After 20 wrong admin tokens within 60 s, each further one is answered after 1 s. Requests with
the right token never wait."""
WORKER_READY = re.compile(r"/v1/rl/workers/.+/ready")
RELOAD_SECONDS = 1.0
"""Seconds between two looks at the key file: a change takes effect within them."""


class AdminAuth:
    """Middleware that returns 401 for every request without the admin token.

    Requests at or below /dashboard go to `dashboard`, which has a login of its own. With
    `worker_token`, a worker may read whether it serves, and nothing else: its readiness probe then
    needs no token that could change the fleet.
    """

    def __init__(
        self,
        app: ASGIApp,
        token: str,
        dashboard: ASGIApp | None = None,
        worker_token: str | None = None,
    ) -> None:
        self._app = app
        self._token = token
        self._dashboard = dashboard
        self._wrong: deque[float] = deque(maxlen=FREE_GUESSES)
        self._worker_token = worker_token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"]
            if self._dashboard is not None and (path + "/").startswith("/dashboard/"):
                await self._dashboard(scope, receive, send)
                return
            try:
                self._check(scope)
            except Unauthorized as error:
                await self._delay_guess()
                await json_response(error_fields(error), error.status)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _delay_guess(self) -> None:
        """Wait before a wrong token is answered, once there were many of them in a minute."""
        now = monotonic()
        is_many = len(self._wrong) == FREE_GUESSES and now - self._wrong[0] < GUESS_SECONDS
        self._wrong.append(now)
        if is_many:
            await asyncio.sleep(GUESS_DELAY_SECONDS)

    def _check(self, scope: Scope) -> None:
        """Raise Unauthorized for a request that may not pass."""
        request = Request(scope)
        if (
            self._worker_token is not None
            and scope["method"] == "GET"
            and WORKER_READY.fullmatch(scope["path"])
        ):
            with suppress(Unauthorized):
                require_bearer(request, self._worker_token)
                return
        require_bearer(request, self._token)


class TenantKeys:
    """The keys of the data plane, looked up by digest: from options, a key file, the store and
    sessions.

    Each key of `keys` is a tenant of its own, unless it is the only one; keys of the key file name
    their tenant. With `shared`, all of them are the default tenant. The key of a session is valid
    as long as the session is stored. Raises BadRequest for a key file that cannot be read.
    """

    def __init__(
        self,
        sessions: Sessions,
        keys: Iterable[str] = (),
        *,
        key_file: Path | None = None,
        store: KeyStore | None = None,
        shared: bool = False,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._sessions = sessions
        self._scopes = Scopes(sessions.secret)
        self._shared = shared
        self._clock = clock
        self._fixed = self._callers(tuple(dict.fromkeys(keys)), alone=key_file is None)
        self._file = None if key_file is None else KeyFile(key_file)
        self._from_file: dict[bytes, Caller] = {}
        self._store, self._stored = store, None if store is None else store.keys
        self._from_store = {} if store is None else self._by_digest(store.keys)
        self._file_stamp: tuple[int, ...] | None = None
        self._checked_at = clock()
        if self._file is not None:
            self._file_stamp = self._stamp(self._file.path)
            self._from_file = self._by_digest(self._file.read())

    @property
    def required(self) -> bool:
        """Whether requests need a key."""
        stored = self._store is not None and self._store.required
        return bool(self._fixed) or self._file is not None or stored

    async def find(self, digest: bytes) -> Caller | None:
        """Return the caller whose key has this digest, or None."""
        if self._file is not None and self._clock() - self._checked_at >= RELOAD_SECONDS:
            self._reload(self._file)
        # The store replaces its tuple when keys change: identity tells, without a comparison.
        if self._store is not None and self._store.keys is not self._stored:
            self._stored = self._store.keys
            self._from_store = self._by_digest(self._stored)
        caller = (
            self._fixed.get(digest) or self._from_file.get(digest) or self._from_store.get(digest)
        )
        return caller or await self._find_session_key(digest)

    async def _find_session_key(self, digest: bytes) -> Caller | None:
        session = await self._sessions.keys.find(digest)
        if session is None:
            return None
        name, terms = session
        return self._scopes.of_session(name, terms.key_id or "", terms.cache_salt)

    def _callers(self, keys: tuple[str, ...], *, alone: bool) -> dict[bytes, Caller]:
        callers: dict[bytes, Caller] = {}
        for key in keys:
            key_id = self._scopes.key_name(key)
            one_tenant = self._shared or (alone and len(keys) == 1)
            caller = self._scopes.of_tenant(DEFAULT_TENANT if one_tenant else key_id, key_id)
            callers |= dict.fromkeys(key_digests(key), caller)
        return callers

    def _reload(self, file: KeyFile) -> None:
        """Read the key file again if it has changed.

        The old keys stay when it cannot be read: a mistake in it must not lock every client out.
        """
        self._checked_at = self._clock()
        stamp = self._stamp(file.path)
        if stamp == self._file_stamp:
            return
        self._file_stamp = stamp
        try:
            new = self._by_digest(file.read())
        except LockstepError as error:
            log.error("key file not reloaded, keys unchanged: %s", error.message)
            return
        before = {str(caller) for caller in self._from_file.values()}
        after = {str(caller) for caller in new.values()}
        added, revoked = sorted(after - before), sorted(before - after)
        log.warning("key file %s reloaded: added %s, revoked %s", file.path, added, revoked)
        self._from_file = new

    def _by_digest(self, keys: Iterable[StoredKey]) -> dict[bytes, Caller]:
        return {
            bytes.fromhex(key.sha256): self._scopes.of_tenant(
                DEFAULT_TENANT if self._shared else key.tenant, key.id
            )
            for key in keys
        }

    @staticmethod
    def _stamp(path: Path) -> tuple[int, ...] | None:
        # The inode too: `lockstep keys` replaces the file, maybe within the clock's resolution.
        try:
            status = path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino


class DataAuth(RequestAuth):
    """Middleware of the data plane.

    The key of a session may use `session_routes` only: routes that store what they generate in the
    session, or generate nothing. Paths that start with `secret_paths` need no key: they
    contain a secret, which a request with a key returned.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: TenantKeys,
        hosts: Iterable[str] | None,
        session_routes: RouteTemplates,
        secret_paths: str | None = None,
    ) -> None:
        super().__init__(app, keys=keys, hosts=hosts)
        self._session_routes = session_routes
        self._secret_paths = secret_paths

    def is_open(self, path: str) -> bool:
        is_secret = self._secret_paths is not None and path.startswith(self._secret_paths)
        return is_secret or super().is_open(path)

    def admit(self, scope: Scope, caller: Any, presented: bytes) -> None:
        if caller is None:
            # Without required keys, the key of an ended session must not become an open door.
            if presented.startswith(SESSION_KEY):
                raise Unauthorized(
                    "this key was minted for a session that has ended", param="authorization"
                )
        elif caller.session is not None and self._session_routes.of(scope["path"]) == UNKNOWN:
            raise Forbidden(
                "this key was minted for one session: it may use the routes that are recorded in "
                "it, such as /v1/chat/completions, and GET /v1/session",
                param="authorization",
            )
