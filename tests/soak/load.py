"""Mixed load on a gateway: sessions, streams, ids, text, errors, aborts, and clients that leave."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp

from tests.processes import GENERATE

CHAT = "/v1/chat/completions"
TURNS = 4
Step = Callable[[], Awaitable[None]]


class Load:
    """Clients of one gateway, each with one of several keys. `counts` says what was done."""

    def __init__(
        self, data: aiohttp.ClientSession, admin: aiohttp.ClientSession, keys: Sequence[str]
    ) -> None:
        self._data, self._admin, self._keys = data, admin, keys
        self._random = random.Random(7)
        self._number = 0
        self.counts: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()

    async def run(self, clients: int, seconds: float) -> None:
        """Lets `clients` work for so long; errors that should not be are counted."""
        async with asyncio.timeout(seconds + 60):
            await asyncio.gather(*(self._client(seconds) for _ in range(clients)))

    async def _client(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        steps: list[Step] = [
            self._session, self._session, self._minted, self._stream, self._generate,
            self._complete, self._refused, self._left, self._aborted, self._scrape,
        ]  # fmt: skip
        while loop.time() < end:
            step = self._random.choice(steps)
            try:
                await step()
                self.counts[step.__name__.strip("_")] += 1
            except (aiohttp.ClientError, TimeoutError) as error:
                self.errors[f"{step.__name__}: {type(error).__name__}"] += 1

    def _headers(self, **more: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self._random.choice(self._keys)}", **more}

    def _name(self) -> str:
        self._number += 1
        return f"soak-{self._number}"

    def _message(self) -> dict[str, str]:
        return {"role": "user", "content": f"Reverse: {self._random.randrange(10**6)}"}

    async def _post(
        self, path: str, body: Any, headers: dict[str, str], expected: int = 200
    ) -> Any:
        async with self._data.post(path, json=body, headers=headers) as response:
            if response.status != expected:
                self.errors[f"{path}: {response.status} {(await response.text())[:160]}"] += 1
                return None
            return await response.json()

    async def _talk(self, path: str, headers: dict[str, str]) -> None:
        messages: list[Any] = []
        for _ in range(TURNS):
            messages.append(self._message())
            body = {"messages": messages, "max_tokens": 12, "temperature": 1.0}
            reply = await self._post(path, body, headers)
            if reply is None:
                return
            messages.append(reply["choices"][0]["message"])

    async def _session(self) -> None:
        name, headers = self._name(), self._headers()
        await self._talk(f"/sessions/{name}{CHAT}", headers)
        async with self._data.get(f"/sessions/{name}/v1/session", headers=headers) as response:
            view = await response.json()
        if response.status != 200:
            self.errors[f"session: {view['error']['message'][:80]}"] += 1
            return
        await self._read_and_delete(view["session"]["id"])

    async def _minted(self) -> None:
        async with self._admin.post("/v1/rl/sessions", json={"max_calls": 50}) as response:
            minted = await response.json()
        await self._talk(CHAT, {"authorization": f"Bearer {minted['key']}"})
        await self._read_and_delete(minted["id"])

    async def _read_and_delete(self, name: str) -> None:
        async with self._admin.get(f"/v1/rl/sessions/{name}") as response:
            await response.read()
        async with self._admin.delete(f"/v1/rl/sessions/{name}") as response:
            if response.status != 200:
                self.errors[f"delete: {response.status}"] += 1

    async def _stream(self) -> None:
        body = {"messages": [self._message()], "max_tokens": 16, "stream": True}
        async with self._data.post(CHAT, json=body, headers=self._headers()) as response:
            if not (await response.read()).endswith(b"data: [DONE]\n\n"):
                self.errors["a stream without its end"] += 1

    async def _generate(self) -> None:
        ids = [self._random.randrange(3, 90) for _ in range(self._random.randrange(1, 200))]
        params = {"max_tokens": 8, "n": 2, "logprobs": 1}
        await self._post(GENERATE, {"token_ids": ids, "sampling_params": params}, self._headers())

    async def _complete(self) -> None:
        body = {"prompt": "Reverse: 12", "max_tokens": 8, "logprobs": 1}
        await self._post("/v1/completions", body, self._headers())

    async def _refused(self) -> None:
        await self._post(CHAT, {"messages": [], "unknown": self._name()}, self._headers(), 400)
        wrong = {"authorization": f"Bearer wrong-{self._name()}"}
        await self._post(f"/sessions/{self._name()}{CHAT}", {}, wrong, 401)
        await self._post(f"/{self._name()}", {}, self._headers(), 404)

    async def _left(self) -> None:
        """Goes away in the middle of a stream."""
        body = {"messages": [self._message()], "max_tokens": 200, "min_tokens": 200, "stream": True}
        async with self._data.post(CHAT, json=body, headers=self._headers()) as response:
            await response.content.readany()
            response.close()

    async def _aborted(self) -> None:
        name, headers = self._name(), self._headers()
        body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 200, "min_tokens": 200}}
        running = asyncio.create_task(self._post(GENERATE, body, {**headers, "x-request-id": name}))
        await asyncio.sleep(0.05)
        await self._post("/inference/v1/abort_requests", {"request_ids": [name]}, headers)
        await running

    async def _scrape(self) -> None:
        async with self._data.get("/metrics", headers=self._headers()) as response:
            await response.read()
