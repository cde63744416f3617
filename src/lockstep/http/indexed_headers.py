"""A request whose headers are looked up in a dictionary.

Starlette goes through all headers for each name, and raises an error for each that is not there:
a request of an agent has some twenty headers, and is asked for a dozen names.
"""

from __future__ import annotations

from typing import TypeVar, overload

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

T = TypeVar("T")


class IndexedHeaders(Headers):
    """Starlette's headers with an index. Of several with one name the first counts, as there."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope=scope)
        self._index: dict[bytes, bytes] = dict(reversed(self._list))

    def __getitem__(self, key: str) -> str:
        value = self.get(key)
        if value is None:
            raise KeyError(key)
        return value

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.get(key) is not None

    @overload
    def get(self, key: str, default: None = None, /) -> str | None: ...
    @overload
    def get(self, key: str, default: str | T, /) -> str | T: ...
    def get(self, key: str, default: str | T | None = None, /) -> str | T | None:
        value = self._index.get(key.lower().encode("latin-1"))
        return default if value is None else value.decode("latin-1")


class IndexedRequest(Request):
    """Starlette's request with such headers."""

    @property
    def headers(self) -> Headers:
        if not hasattr(self, "_headers"):
            self._headers = IndexedHeaders(self.scope)
        return self._headers
