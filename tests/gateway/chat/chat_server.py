"""A gateway with only the chat routes, in front of workers, and clients of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
from starlette.applications import Starlette
from starlette.routing import BaseRoute, Mount

from lockstep.fleet.routing.pool import Pool
from lockstep.gateway.chat.route import ChatRoutes
from lockstep.gateway.context import GatewayContext
from lockstep.gateway.model_registry import ModelRegistry
from lockstep.gateway.sessions.sessions import Sessions
from lockstep.http.handlers import EXCEPTION_HANDLERS
from lockstep.http.server.server import listen, serving, url_of
from lockstep.protocol.common.error_body import CODES

CHAT = "/v1/chat/completions"
TOOL = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Evaluates an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
SUM = [{"role": "user", "content": "What is 417 + 86?"}]
REVERSE = [{"role": "user", "content": "Reverse: 40213"}]


class Served:
    """A gateway with only the chat routes, and clients of it."""

    def __init__(self, url: str, sessions: Sessions, pool: Pool) -> None:
        self.url, self.sessions, self.pool = url, sessions, pool
        self.http = httpx.AsyncClient(base_url=url, timeout=60)
        self.openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    async def post(
        self, path: str = CHAT, headers: dict[str, str] | None = None, **body: Any
    ) -> Any:
        """The response to a request that must succeed."""
        response = await self.http.post(path, json={"model": "tiny", **body}, headers=headers)
        assert response.status_code == 200, response.text
        return response.json()

    async def refusal(self, path: str = CHAT, status: int = 400, **body: Any) -> Any:
        """The error of a request that must not succeed."""
        headers = body.pop("headers", None)
        response = await self.http.post(path, json={"model": "tiny", **body}, headers=headers)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert error["code"] == CODES.get(error["reason"], status)
        assert error["request_id"]
        return error

    async def chunks(self, headers: dict[str, str] | None = None, **body: Any) -> list[Any]:
        """The decoded events of a streamed response, without [DONE]."""
        request = {"model": "tiny", "stream": True, **body}
        response = await self.http.post(CHAT, json=request, headers=headers)
        assert response.status_code == 200, response.text
        lines = [line for line in response.text.splitlines() if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@asynccontextmanager
async def chat_server(*workers: str, tokenizer: str = "tiny") -> AsyncIterator[Served]:
    async with Pool() as pool, Sessions() as sessions:
        for url in workers:
            await pool.add(url)
        context = GatewayContext(
            pool=pool, models=ModelRegistry(pool.models, tokenizer), sessions=sessions
        )
        routes: list[BaseRoute] = list(ChatRoutes(context).routes)
        app = Starlette(
            routes=[*routes, Mount("/sessions/{session}", routes=routes)],
            exception_handlers=EXCEPTION_HANDLERS,
        )
        with listen("127.0.0.1", 0) as sock:
            async with serving([(app, sock)]):
                served = Served(url_of(sock), sessions, pool)
                try:
                    yield served
                finally:
                    await served.http.aclose()
                    await served.openai.close()


def joined(chunks: list[Any], n: int = 1) -> list[Any]:
    """The choices that a stream adds up to, in the shape of a whole response's."""
    choices = [
        {"content": "", "reasoning": "", "calls": [], "ids": [], "entries": [], "nvext": []}
        for _ in range(n)
    ]
    for chunk in chunks:
        for item in chunk["choices"]:
            choice, delta = choices[item["index"]], item["delta"]
            choice["content"] += delta.get("content") or ""
            choice["reasoning"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", ()):
                assert call.pop("index") == len(choice["calls"])
                choice["calls"].append(call)
            choice["ids"] += item.get("token_ids") or []
            choice["entries"] += (item["logprobs"] or {}).get("content", [])
            choice["nvext"] += chunk.get("nvext", {}).get("completion_token_ids", [])
            choice["finish"] = item["finish_reason"]
    return choices
