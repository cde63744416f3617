"""An object store, through obstore. Credentials come from the environment that obstore reads.

Errors name the object and the status, and never repeat the text of the server's response or of the
library: both can contain keys and signatures.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.checkpoint.stores.url import StoreUrl
from lockstep.tokens.errors import CheckpointError, MissingObject, Unavailable, UnsupportedField

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Backend

CONNECT_SECONDS = 10
REQUEST_SECONDS = 120
"""Longest time of one request, of one piece of an object at most."""
RETRIES = 6
RETRY_SECONDS = 30
"""Seconds after which an unreachable store is an error."""
CONNECTIONS = 8
"""Requests at once for one file."""
PART = 8 << 20
"""Bytes of a part of a multipart upload; smaller files are one request."""


class ObjectStore:
    """The bucket of a URL. Keys are those of the whole bucket. Any thread may call any method.

    Every method raises CheckpointError for an object that does not exist or must not be read, and
    Unavailable for a store that does not respond.
    """

    def __init__(self, url: StoreUrl) -> None:
        self.url = StoreUrl(url.scheme, url.bucket)
        self._backend = _open(self.url)

    def size(self, key: str) -> int:
        """Return the size of an object in bytes."""
        with self._errors(key):
            return int(_obstore().head(self._backend, key)["size"])

    def exists(self, key: str) -> bool:
        try:
            self.size(key)
        except MissingObject:
            return False
        return True

    def read(self, key: str, start: int, end: int) -> memoryview:
        """Return bytes [start, end) of an object. Raises NoRanges if the server ignores ranges."""
        if start == end:
            return memoryview(b"")
        with self._errors(key):
            data = memoryview(_obstore().get_range(self._backend, key, start=start, end=end))
        if len(data) != end - start:
            raise Unavailable(f"{self.url.child(key)} ended after {len(data)} of {end - start} "
                              f"bytes from byte {start}")  # fmt: skip
        return data

    def stream(self, key: str, piece: int) -> Iterator[memoryview]:
        """Yield a whole object in pieces of at least `piece` bytes, apart from the last."""
        with self._errors(key):
            for part in _obstore().get(self._backend, key).stream(min_chunk_size=piece):
                yield memoryview(part)

    def directories(self, prefix: StoreUrl) -> list[str]:
        """Return the names of what looks like directories right below a prefix."""
        with self._errors(prefix.key):
            listed = _obstore().list_with_delimiter(self._backend, prefix.key or None)
        return sorted(path.rstrip("/").rpartition("/")[2] for path in listed["common_prefixes"])

    def keys(self, prefix: StoreUrl) -> list[str]:
        """Return the keys of all objects below a prefix."""
        with self._errors(prefix.key):
            pages = _obstore().list(self._backend, f"{prefix.key}/" if prefix.key else None)
            return [item["path"] for page in pages for item in page]

    def write(self, key: str, contents: bytes | Path) -> None:
        """Store an object, whole or not at all. A large file is sent in parts, several at once."""
        with self._errors(key):
            _obstore().put(self._backend, key, contents, chunk_size=PART,
                           max_concurrency=CONNECTIONS)  # fmt: skip

    def delete(self, keys: list[str]) -> None:
        with self._errors(keys[0] if keys else ""):
            _obstore().delete(self._backend, keys)

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except _failures() as error:
            raise _explain(error, str(self.url.child(key))) from None


class NoRanges(Exception):
    """A server that returns whole objects where a range was requested."""


def _open(url: StoreUrl) -> Backend:
    from_url = _obstore().store.from_url
    client: dict[str, Any] = {
        "timeout": timedelta(seconds=REQUEST_SECONDS),
        "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
    }
    # These options replace what obstore reads from this variable.
    if os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true"):
        client["allow_http"] = True
    retry = {
        "max_retries": RETRIES,
        "retry_timeout": timedelta(seconds=RETRY_SECONDS),
        "backoff": {
            "init_backoff": timedelta(milliseconds=100),
            "max_backoff": timedelta(seconds=5),
            "base": 2,
        },
    }
    try:
        backend: Backend = from_url(str(url), client_options=client, retry_config=retry)
    except _failures() as error:
        raise _explain(error, str(url)) from None
    return backend


def _failures() -> tuple[type[Exception], ...]:
    """Return what obstore raises: for a missing object it is Python's FileNotFoundError."""
    return (_obstore().exceptions.BaseError, OSError, ValueError)


def _obstore() -> Any:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ModuleNotFoundError:
        raise UnsupportedField(
            "object stores need obstore, which is not installed here: pip install "
            "'lockstep-rl[stores]'",
            param="weight_dir",
        ) from None
    return obstore


def _explain(error: Exception, where: str) -> Exception:
    """Return the error to raise for one of obstore's, whose text stays out of it."""
    text = str(error)
    if isinstance(error, FileNotFoundError):
        return MissingObject(f"{where} does not exist")
    if "NotPartial" in text:
        return NoRanges(f"the server of {where} returns whole objects where ranges are requested")
    status = re.search(r"status code: (\d{3})", text)
    code = re.search(r"<Code>(\w{1,64})</Code>", text)
    facts = ", ".join(match[1] for match in (status, code) if match is not None)
    refused = type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError")
    if refused or (code is not None and code[1] in ("ExpiredToken", "InvalidToken")):
        return CheckpointError(
            f"{where}: the store refused access ({facts or 'no credentials'}): the credentials in "
            "the environment of this process are missing, expired or not allowed to use it"
        )
    if status is not None and 400 <= int(status[1]) < 500 and int(status[1]) not in (408, 429):
        return CheckpointError(f"{where}: the store rejected the request ({facts})")
    if "HTTP error: builder error" in text:
        return CheckpointError(
            f"{where}: the endpoint is not https, which needs AWS_ALLOW_HTTP=true in the "
            "environment of this process"
        )
    reason = facts or type(error).__name__.removesuffix("Error").lower() + " error"
    return Unavailable(f"{where}: the store did not respond as expected ({reason}): try again")
