"""A server that responds with canned bodies, in a process of its own, for client benchmarks."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from lockstep.protocol.vllm.generate_request import Form
from lockstep.protocol.vllm.generate_response import generate_response
from lockstep.tokens import Completion, RoutedExperts, VersionSpan

TOKENS, PROMPT, LONG_PROMPT = 8_192, 2_048, 32_768
LAYERS, TOP_K = 48, 8
CARD = {"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 1_000_000}]}


def sampled(tokens: int, prompt: int, experts: RoutedExperts | None = None) -> Completion:
    draw = random.Random(0)
    ids = [draw.randrange(151_936) for _ in range(tokens)]
    return Completion(
        token_ids=ids,
        logprobs=[-draw.expovariate(0.5) for _ in ids],
        ranks=[draw.randrange(1, 40) for _ in ids],
        prompt_ids=list(range(prompt)),
        finish="stop",
        versions=(VersionSpan("v1", 0, tokens),),
        experts=experts,
    )


def lockstep_form(completion: Completion, *, flat: bool = False) -> bytes:
    """The body of a Lockstep server: entries that both clients can read, or bare logprobs."""
    form = Form(logprobs="flat" if flat else "entries")
    return generate_response([completion], request_id="r", model="m", created=0, form=form)


def prime_form(completion: Completion) -> bytes:
    """The same body as prime-rl's server writes it: a token is only named as `token_id:N`."""
    content = []
    for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
        entry = {"token": f"token_id:{token}", "logprob": logprob, "bytes": None}
        content.append({**entry, "top_logprobs": [dict(entry)]})
    choice = {
        "index": 0,
        "token_ids": completion.token_ids,
        "finish_reason": "stop",
        "routed_experts": None,
        "logprobs": {"content": content},
    }
    return json.dumps({"request_id": "r", "choices": [choice]}, separators=(",", ":")).encode()


def bodies() -> dict[str, bytes]:
    """8,192 tokens with logprobs in three forms, and 22 MB of experts with them."""
    rows = LONG_PROMPT + TOKENS - 1
    data = random.Random(0).randbytes(rows * LAYERS * TOP_K)
    experts = RoutedExperts(data, (rows, LAYERS, TOP_K), "uint8")
    return {
        "tokens": lockstep_form(sampled(TOKENS, PROMPT)),
        "flat": lockstep_form(sampled(TOKENS, PROMPT), flat=True),
        "prime": prime_form(sampled(TOKENS, PROMPT)),
        "experts": lockstep_form(sampled(TOKENS, LONG_PROMPT, experts)),
    }


async def listen(respond: Callable[[str, bytes], bytes]) -> asyncio.Server:
    """A server on a free port of this machine: the JSON of `respond`, given a path and a body."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                line, *fields = head.split("\r\n")
                lengths = [f for f in fields if f.lower().startswith("content-length:")]
                sent = b""
                if lengths:
                    sent = await reader.readexactly(int(lengths[0].split(":")[1]))
                body = respond(line.split()[1], sent)
                kind = "application/json"
                writer.write(
                    f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\n"
                    f"content-length: {len(body)}\r\n\r\n".encode()
                    + body
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    return await asyncio.start_server(talk, "127.0.0.1", 0, limit=1 << 24)


def port_of(server: asyncio.Server) -> int:
    port: int = server.sockets[0].getsockname()[1]
    return port


async def _serve(pipe: Connection, canned: dict[str, bytes]) -> None:
    card = json.dumps(CARD).encode()
    server = await listen(
        lambda path, _: card if path.endswith("/models") else canned[path.split("/")[1]]
    )
    pipe.send(port_of(server))
    await server.serve_forever()


def _main(pipe: Connection, canned: dict[str, bytes]) -> None:
    asyncio.run(_serve(pipe, canned))


@contextmanager
def served(canned: dict[str, bytes]) -> Iterator[str]:
    """The base URL of the server; the body `name` is under `/name`."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_main, args=(theirs, canned), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.terminate()
        process.join()
