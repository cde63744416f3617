"""Chunks of a worker's response to Dynamo's frontend: tokens, and at the end their record."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from typing import Any

import msgspec

from lockstep.engine.sampler import Sampled
from lockstep.engine.sequence import StreamedToken
from lockstep.protocol.common.prompt_logprobs import encode_prompt_logprobs
from lockstep.protocol.vllm.generate_response import experts_field, stop_reason_of
from lockstep.tokens import Completion

Chunk = dict[str, Any]
SECONDS = 0.03
"""Seconds to collect tokens for one chunk. A chunk costs the frontend as much as 30 tokens."""
MOST = 64
FINISH = {"stop": "stop", "length": "length", "tool_calls": "stop", "abort": "cancelled"}
"""Dynamo's finish reasons. "cancelled" reaches the client as `stop`; only engine_data differs."""


async def collect(
    pieces: AsyncIterator[StreamedToken], seconds: float = SECONDS, most: int = MOST
) -> AsyncGenerator[list[StreamedToken], None]:
    """Yield the pieces in lists, each of `seconds` or about `most` pieces.

    Closing the generator stops them. An end token and the record of its choice are one piece, so
    they stay together: the frontend ends a choice at its end token and would not wait for more.
    """
    waiting: list[StreamedToken] = []
    arrived = asyncio.Event()

    async def pump() -> None:
        try:
            async for piece in pieces:
                waiting.append(piece)
                arrived.set()
        finally:
            arrived.set()

    # A task reads ahead, so that waiting for more tokens never cancels a read of the engine.
    task = asyncio.create_task(pump())
    loop = asyncio.get_running_loop()
    try:
        while True:
            await arrived.wait()
            due = loop.time() + seconds
            while not task.done() and len(waiting) < most and (rest := due - loop.time()) > 0:
                arrived.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(rest):
                        await arrived.wait()
            arrived.clear()
            if waiting:
                ready, waiting[:] = list(waiting), []
                yield ready
            if task.done() and not waiting:
                await task  # raise the error that ended it, if any
                return
            if waiting or task.done():
                arrived.set()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(task, return_exceptions=True)


def chunks_of(pieces: list[StreamedToken], *, engine_data: bool) -> list[Chunk]:
    """Return one chunk for each choice that has new tokens."""
    indices = dict.fromkeys(piece.index for piece in pieces)
    return [
        _chunk(index, [p for p in pieces if p.index == index], engine_data) for index in indices
    ]


def _chunk(index: int, pieces: list[StreamedToken], engine_data: bool) -> Chunk:
    tokens = [piece.sampled for piece in pieces if piece.sampled is not None]
    chunk: Chunk = {
        "index": index,
        "token_ids": [token.token_id for token in tokens],
        "log_probs": [token.logprob for token in tokens],
    }
    if any(token.top for token in tokens):
        chunk["top_logprobs"] = [_tops(token) for token in tokens]
    completion = next((piece.completion for piece in pieces if piece.completion is not None), None)
    if completion is not None:
        chunk["finish_reason"] = FINISH[completion.finish]
        prompt, sampled = len(completion.prompt_ids), len(completion.token_ids)
        chunk["completion_usage"] = {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
        }
        if engine_data:
            chunk["engine_data"] = engine_data_of(completion)
    return chunk


def _tops(token: Sampled) -> list[Chunk]:
    return [
        {"token_id": top.token_id, "logprob": top.logprob, "rank": top.rank} for top in token.top
    ]


def engine_data_of(completion: Completion) -> Chunk:
    """Return the record of one choice: Dynamo's names, and fields that only Lockstep has.

    `finished` is false for an aborted choice. Keys of prompt logprobs are strings, as the frontend
    requires.
    """
    data: Chunk = {
        "prompt_token_ids": completion.prompt_ids,
        "completion_token_ids": completion.token_ids,
        "completion_logprobs": completion.logprobs,
        "finished": completion.finish != "abort",
        "finish_reason": completion.finish,
        "stop_reason": stop_reason_of(completion),
        "weight_version": completion.versions[-1].version if completion.versions else None,
        "weight_versions": msgspec.to_builtins(list(completion.versions)),
        "logprob_mode": completion.logprob_mode,
        "temperature": completion.temperature,
        "shaping": msgspec.to_builtins(completion.shaping),
        "adapter": completion.adapter,
        "worker": completion.worker,
    }
    if completion.prompt_logprobs is not None:
        data["prompt_logprobs"] = msgspec.to_builtins(
            encode_prompt_logprobs(completion.prompt_logprobs)
        )
    if completion.experts is not None:
        data["routed_experts"] = msgspec.to_builtins(experts_field(completion.experts, "raw"))
    return data
