"""What pages of other sites have a browser send is refused, and other clients never notice."""

from __future__ import annotations

import pytest

from lockstep.http.exposure import check_origins
from lockstep.http.server.server import listen, serving
from lockstep.tokens.errors import BadRequest
from tests.http.peer import HOST, Handlers, application, connected

OURS = "http://x"
"""Requests of these tests have the Host x."""


async def status(headers: str, origins: tuple[str, ...] = (), method: str = "POST") -> str:
    with listen("127.0.0.1", 0) as sock:
        async with serving([(application(Handlers()), sock)], origins=origins):
            async with connected(sock.getsockname()[1]) as peer:
                peer.send(f"{method} /echo {HOST}{headers}")
                return await peer.head()


@pytest.mark.parametrize("headers", [
    "\norigin: https://evil.example",
    "\norigin: null",
    "\norigin: http://x.evil.example",
    "\norigin: https://x",
    "\nsec-fetch-site: cross-site",
    "\nsec-fetch-site: same-site",
    "\nsec-fetch-site: cross-site\nsec-fetch-mode: navigate",
    "\norigin: http://evil.example\nsec-fetch-site: same-origin",
])  # fmt: skip
async def test_a_page_of_another_site_may_not_call(headers: str) -> None:
    assert " 403 " in (await status(headers)).partition("\r\n")[0]


@pytest.mark.parametrize("headers", [
    "",
    f"\norigin: {OURS}\nsec-fetch-site: same-origin",
    f"\norigin: {OURS}",
    "\nsec-fetch-site: none",
])  # fmt: skip
async def test_its_own_pages_and_clients_without_a_browser_may(headers: str) -> None:
    assert " 200 " in (await status(headers)).partition("\r\n")[0]


async def test_a_link_may_be_followed_and_a_form_not_sent() -> None:
    link = "\nsec-fetch-site: cross-site\nsec-fetch-mode: navigate"
    assert " 200 " in await status(link, method="GET")
    assert " 403 " in await status(link, method="POST")


async def test_an_allowed_site_may_call_and_read_the_answer() -> None:
    site = "https://app.example"
    headers = f"\norigin: {site}\nsec-fetch-site: cross-site"
    answer = await status(headers, (site,))
    assert " 200 " in answer
    assert f"access-control-allow-origin: {site}" in answer
    preflight = await status(
        f"{headers}\naccess-control-request-method: POST\naccess-control-request-headers: x-a",
        (site,),
        "OPTIONS",
    )
    assert " 200 " in preflight
    assert "access-control-allow-headers: x-a" in preflight
    assert " 403 " in await status("\norigin: https://other.example", (site,))
    assert " 200 " in await status("\norigin: https://other.example", ("*",))


def test_an_origin_is_a_scheme_and_a_host() -> None:
    assert check_origins(["https://App.example:8443", "*"]) == ("https://app.example:8443", "*")
    for wrong in ("app.example", "https://app.example/", "", "https://"):
        with pytest.raises(BadRequest, match="--allow-origin"):
            check_origins([wrong])
