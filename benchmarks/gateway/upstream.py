"""The upstream of the gateway benchmark: responds to every request at once with a canned body.

    python -m benchmarks.gateway.upstream TRAFFIC

It listens on two ports, as a vLLM server and as a Lockstep worker, and prints them in a JSON line.
A streamed response is one event per token, each in an HTTP chunk of its own, all written at once.
"""

from __future__ import annotations

import asyncio
import json
import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import cast

import uvloop

from benchmarks.gateway import responses as bodies
from benchmarks.gateway.traffic import CASES, Traffic

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
NONE = b"HTTP/1.1 404 Not Found\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
END = b"0\r\n\r\n"
ENDS = 1_500
"""Bytes at each end of a body in which its options are looked for: the prompt lies between, and
some clients write it first, others last."""
LONG = 28_000
"""Bytes of a body from which on its prompt counts as one of the long ones."""
ROUTES = ("/inference/v1/generate", "/v1/chat/completions", "/v1/completions")
Key = tuple[str, bool, bool, bool]
"""Route; a long prompt; a streamed response; return_token_ids or, for generate, flat logprobs."""


class CannedResponses:
    """The responses of one server, by what its requests differ in."""

    def __init__(self, owner: str, traffic: Traffic) -> None:
        self.card = whole(bodies.models(owner))
        self.canned: dict[Key, list[bytes]] = {}
        outs = {case.stream: case.out for case in CASES.values()}
        prompts = sorted({case.prompt for case in CASES.values()})
        for key in product(ROUTES, (False, True), (False, True), (False, True)):
            path, long, stream, flag = key
            completion, prompt = traffic.completions.get(outs[stream]), prompts[-1 if long else 0]
            if completion is None:
                continue
            if stream:
                self.canned[key] = chunked(bodies.events(owner, path, completion, prompt, flag))
            else:
                self.canned[key] = [whole(bodies.body(owner, path, completion, prompt, flag))]

    def response(self, path: str, body: bytes) -> list[bytes]:
        """The pieces of the response. Raises KeyError for any other request."""
        options = (body[:ENDS] + body[-ENDS:]).replace(b" ", b"")
        stream = b'"stream":true' in options
        flag = b'"return_token_ids":true' in options or b'"logprobs_format":"flat"' in options
        return self.canned[path, len(body) > LONG, stream, flag]


def whole(body: bytes) -> bytes:
    return HEAD % len(body) + body


def chunked(events: list[bytes]) -> list[bytes]:
    return [STREAM_HEAD, *(b"%x\r\n%b\r\n" % (len(event), event) for event in events), END]


class Server(asyncio.Protocol):
    """One connection. Requests come one after the other, with a length."""

    def __init__(self, responses: CannedResponses) -> None:
        self._responses = responses
        self._buffer = bytearray()
        self._need = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) < self._need:
            return
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._buffer[:end]).lower()
        at = head.find(b"\r\ncontent-length:")
        length = int(head[at + 17 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        self._need = end + 4 + length
        if len(self._buffer) < self._need:
            return
        method, path, _ = bytes(self._buffer[: head.find(b"\r\n")]).decode().split(" ", 2)
        body = bytes(self._buffer[end + 4 : self._need])
        self._buffer.clear()
        self._need = 0
        self._respond(method, path, body)

    def _respond(self, method: str, path: str, body: bytes) -> None:
        if method == "POST":
            self._transport.writelines(self._responses.response(path, body))
        elif path == "/v1/models":
            self._transport.write(self._responses.card)
        else:
            self._transport.write(whole(b"{}") if path == "/health" else NONE)


async def serve(traffic: Traffic) -> None:
    loop = asyncio.get_running_loop()
    ports = {}
    for owner in ("vllm", "lockstep"):
        canned = CannedResponses(owner, traffic)
        server = await loop.create_server(partial(Server, canned), "127.0.0.1", 0)
        ports[owner] = server.sockets[0].getsockname()[1]
    print(json.dumps(ports), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(Traffic.read(Path(sys.argv[1]))))
