"""Control calls on the data port: only where they are asked for, and never more open than there."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from lockstep.gateway.options import GatewayOptions
from lockstep.gateway.single_port import SinglePort
from lockstep.http.tls import TlsFiles
from lockstep.tokens.errors import Forbidden

TOKEN = "admin"


def app(name: str) -> Starlette:
    async def answer(http: Request) -> JSONResponse:
        return JSONResponse({"plane": name, "path": http.url.path, "query": http.url.query})

    return Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])


async def plane(method: str, path: str, token: str = "") -> tuple[str, str]:
    both = SinglePort(app("data"), app("control"), TOKEN)
    headers = {"authorization": f"Bearer {token}"} if token else {}
    transport = httpx.ASGITransport(both)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        answer = (await client.request(method, path, headers=headers)).json()
    return answer["plane"], answer["path"]


async def test_mutations_always_go_to_the_control_plane() -> None:
    for path in ("/load_lora_adapter", "/v1/unload_lora_adapter", "/pause", "/update_weights"):
        assert await plane("POST", path) == ("control", f"/v1/rl{path}")


async def test_shared_paths_go_to_the_control_plane_with_the_admin_token_only() -> None:
    for path in ("/v1/models", "/metrics"):
        assert await plane("GET", path) == ("data", path)
        assert await plane("GET", path, "other") == ("data", path)
        assert await plane("GET", path, TOKEN) == ("control", f"/v1/rl{path}")


async def test_all_else_stays_where_it_was() -> None:
    for path in ("/health", "/v1/chat/completions", "/v1/rl/state", "/pause/more"):
        assert (await plane("GET", path, TOKEN))[0] == "data"


def test_a_token_does_not_cross_the_network_in_the_clear() -> None:
    options = GatewayOptions(host="10.0.0.5", api_keys=("k",))
    options.check()
    with pytest.raises(Forbidden, match="unencrypted"):
        GatewayOptions(host="10.0.0.5", api_keys=("k",), single_port=True).check()


def test_a_client_certificate_is_not_gone_around() -> None:
    tls = TlsFiles(cert=Path("a.pem"), key=Path("a.key"), ca=Path("ca.pem"))
    GatewayOptions(tls=tls).check()
    with pytest.raises(Forbidden, match="client certificate"):
        GatewayOptions(tls=tls, single_port=True).check()
