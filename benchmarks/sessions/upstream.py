"""The upstream of the session benchmark: a vLLM server that answers every turn at once.

    python -m benchmarks.sessions.upstream TOKENIZER

It prints its port in a JSON line. A chat that asks for token ids gets as many ids of its prompt as
a prompt of so many turns has.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
import sys

from benchmarks.canned import listen, port_of
from benchmarks.conversation import prose
from benchmarks.gateway import responses as answers
from benchmarks.gateway.traffic import Said
from lockstep.render import Renderer

LENGTHS = range(156, 164)
"""Tokens of the answers, which all differ; a question has about as many."""
TURN = 2 * 160


class Turns:
    """An answer by the number of the turn that a body asks for."""

    def __init__(self, said: list[Said]) -> None:
        self._said = said
        self._made = functools.cache(self._make)

    def answer(self, path: str, body: bytes) -> bytes:
        if path.endswith("/models"):
            return answers.models("vllm")
        if path == "/health":
            return b"{}"
        asked = body.count(b'"user"') if path.endswith("/completions") else 0
        return self._made(path, asked, len(body) % len(self._said))

    def _make(self, path: str, asked: int, which: int) -> bytes:
        prompt = max(asked * TURN - TURN // 2, 0)
        return answers.body("vllm", path, self._said[which], prompt, True)


async def serve(turns: Turns) -> None:
    server = await listen(turns.answer)
    print(json.dumps({"port": port_of(server)}), flush=True)
    await server.serve_forever()


def answer(draw: random.Random, renderer: Renderer, length: int) -> Said:
    ids = renderer.encode(prose(draw, renderer, 2 * length))[: length - 1]
    return Said(
        ids=[*ids, renderer.stop_token_ids[0]],
        logprobs=[-draw.expovariate(0.5) for _ in range(length)],
        pieces=[renderer.tokenizer.decode([token]) for token in ids],
    )


def main(tokenizer: str) -> None:
    draw, renderer = random.Random(0), Renderer.load(tokenizer)
    asyncio.run(serve(Turns([answer(draw, renderer, length) for length in LENGTHS])))


if __name__ == "__main__":
    main(sys.argv[1])
