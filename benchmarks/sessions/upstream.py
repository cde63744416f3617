"""The upstream of the session benchmark: a vLLM server that responds to every turn at once.

    python -m benchmarks.sessions.upstream TOKENIZER

It prints its port in a JSON line. A chat that wants token ids gets as many ids of its prompt as a
prompt of so many turns has.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
import sys

from benchmarks.canned import listen, port_of
from benchmarks.conversation import prose
from benchmarks.gateway import responses
from benchmarks.gateway.traffic import CannedCompletion
from lockstep.render import Renderer

LENGTHS = range(156, 164)
"""Tokens of the completions, which all differ; a question has about as many."""
TURN = 2 * 160


class Turns:
    """The response to each turn, by the number of turns in the body of a request."""

    def __init__(self, completions: list[CannedCompletion]) -> None:
        self._completions = completions
        self._made = functools.cache(self._make)

    def response(self, path: str, body: bytes) -> bytes:
        if path.endswith("/models"):
            return responses.models("vllm")
        if path == "/health":
            return b"{}"
        turn = body.count(b'"user"') if path.endswith("/completions") else 0
        return self._made(path, turn, len(body) % len(self._completions))

    def _make(self, path: str, turn: int, which: int) -> bytes:
        prompt = max(turn * TURN - TURN // 2, 0)
        return responses.body("vllm", path, self._completions[which], prompt, True)


async def serve(turns: Turns) -> None:
    server = await listen(turns.response)
    print(json.dumps({"port": port_of(server)}), flush=True)
    await server.serve_forever()


def completion(draw: random.Random, renderer: Renderer, length: int) -> CannedCompletion:
    ids = renderer.encode(prose(draw, renderer, 2 * length))[: length - 1]
    return CannedCompletion(
        ids=[*ids, renderer.stop_token_ids[0]],
        logprobs=[-draw.expovariate(0.5) for _ in range(length)],
        pieces=[renderer.tokenizer.decode([token]) for token in ids],
    )


def main(tokenizer: str) -> None:
    draw, renderer = random.Random(0), Renderer.load(tokenizer)
    asyncio.run(serve(Turns([completion(draw, renderer, length) for length in LENGTHS])))


if __name__ == "__main__":
    main(sys.argv[1])
