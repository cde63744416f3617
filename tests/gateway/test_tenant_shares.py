"""A worker bounds the grammars of a tenant by who sent a request, not by what the request says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lockstep.engine import Engine, EngineOptions
from lockstep.gateway.callers import Scopes, full_name
from lockstep.http.server.server import listen, serving, url_of
from lockstep.models import bundled
from lockstep.worker.data import DataPlane
from tests.gateway.data_gateway import data_gateway

TINY = bundled("tiny") or Path()
SAMPLING = {"max_tokens": 2, "structured_outputs": {"regex": "[ab]{2}"}}
GENERATE = {"token_ids": [1, 2, 3], "sampling_params": SAMPLING}
CHAT = {"messages": [{"role": "user", "content": "a"}], **SAMPLING}
ROUTES: dict[str, Mapping[str, Any]] = {
    "/inference/v1/generate": GENERATE,
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": [1, 2, 3], **SAMPLING},
}


async def test_a_grammar_counts_for_the_tenant_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Engine(TINY, EngineOptions(arithmetic="close", max_model_len=256)) as engine:
        tenants: list[str] = []
        hold = engine._grammar_shares.hold

        def watched(tenant: str, grammar: Any) -> Any:
            tenants.append(tenant)
            return hold(tenant, grammar)

        monkeypatch.setattr(engine._grammar_shares, "hold", watched)
        with listen("127.0.0.1", 0) as sock:
            async with serving([(DataPlane(engine, "tiny", TINY).app, sock)]):
                await send_all(url_of(sock))
    first, second = tenants[: len(ROUTES)], tenants[len(ROUTES) : 2 * len(ROUTES)]
    # Neither the route, nor ids that look like another tenant's, nor the header change the tenant.
    assert set(first) == {first[0]}
    assert set(second) == {second[0]}
    assert first[0] != second[0]
    # A session key of the first tenant uses the first tenant's share.
    assert tenants[-1] == first[0]


async def send_all(worker_url: str) -> None:
    """Send a request to each route with two keys, then one with a session key of the first."""
    async with (
        data_gateway(worker_url, api_keys=("first", "second")) as (url, sessions),
        aiohttp.ClientSession(url) as http,
    ):

        async def post(path: str, body: Mapping[str, Any], key: str, request_id: str) -> None:
            headers = {
                "authorization": f"Bearer {key}",
                "x-request-id": request_id,
                "x-lockstep-tenant": request_id,
            }
            async with http.post(path, json=body, headers=headers) as response:
                assert response.status == 200, await response.text()

        for key in ("first", "second"):
            for at, (path, body) in enumerate(ROUTES.items()):
                await post(path, body, key, f"mine~{at}")
        tenant = Scopes(sessions.secret).key_name("first")
        minted, _ = await sessions.keys.mint(full_name(tenant, "task"))
        await post("/inference/v1/generate", GENERATE, minted, "theirs~x")
