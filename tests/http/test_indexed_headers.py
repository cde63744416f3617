"""Headers that are looked up in a dictionary say what Starlette's do."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.datastructures import Headers
from starlette.requests import Request

from lockstep.http.http_request import IndexedRequest

SCOPE: dict[str, Any] = {
    "type": "http",
    "headers": [(b"x-a", b"first"), (b"x-b", b"\xe9"), (b"x-a", b"second"), (b"x-empty", b"")],
}


@pytest.mark.parametrize("name", ["x-a", "X-A", "x-b", "x-empty", "x-none"])
def test_a_header_is_what_it_is_for_starlette(name: str) -> None:
    ours, theirs = IndexedRequest(SCOPE).headers, Request(SCOPE).headers
    assert ours.get(name) == theirs.get(name)
    assert ours.get(name, "else") == theirs.get(name, "else")
    assert (name in ours) == (name in theirs)
    assert ours.getlist(name) == theirs.getlist(name)


def test_the_first_of_a_name_counts() -> None:
    assert IndexedRequest(SCOPE).headers["x-a"] == "first"


def test_a_header_that_is_not_there_is_no_key() -> None:
    headers = IndexedRequest(SCOPE).headers
    with pytest.raises(KeyError, match="x-none"):
        headers["x-none"]
    assert 7 not in headers


def test_all_headers_are_listed() -> None:
    assert IndexedRequest(SCOPE).headers == Headers(scope=SCOPE)
