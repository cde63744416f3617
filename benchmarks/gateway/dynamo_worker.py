"""A Dynamo worker that responds to every request at once, for the gateway benchmark.

    python -m benchmarks.gateway.dynamo_worker TRAFFIC MODEL_DIR

Runs in Dynamo's environment. A request gets its response in one chunk, the cheapest for a frontend;
the long one that is streamed comes in a chunk per token, as an engine gives it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from benchmarks.gateway.traffic import CASES, MODEL, CannedCompletion, Traffic

CONTEXT, BLOCK = 40_960, 16
GENERATE_ROUTE = "vllm_inference_v1_generate"
"""A worker that sets this lets the frontend serve POST /inference/v1/generate from it."""


def chunks(completion: CannedCompletion, *, stream: bool) -> list[dict[str, Any]]:
    step = 1 if stream else len(completion.ids)
    made: list[dict[str, Any]] = [
        {
            "index": 0,
            "token_ids": completion.ids[at : at + step],
            "log_probs": completion.logprobs[at : at + step],
        }
        for at in range(0, len(completion.ids), step)
    ]
    made[-1]["finish_reason"] = "stop"
    return made


async def main(traffic: Traffic, model: str) -> None:
    from dynamo.llm import ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model
    from dynamo.runtime import DistributedRuntime

    streamed = {case.out: case.stream for case in CASES.values()}
    canned = {
        out: chunks(completion, stream=streamed[out])
        for out, completion in traffic.completions.items()
    }

    async def generate(request: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        out, prompt = request["stop_conditions"]["max_tokens"], len(request["token_ids"])
        usage = {"prompt_tokens": prompt, "completion_tokens": out, "total_tokens": prompt + out}
        *first, last = canned[out]
        for chunk in first:
            yield chunk
        yield {**last, "completion_usage": usage}

    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    endpoint = runtime.endpoint("dynamo.backend.generate")
    config = ModelRuntimeConfig()
    config.context_length = CONTEXT
    config.set_engine_specific(GENERATE_ROUTE, json.dumps(True))
    await register_model(
        ModelInput.Tokens,
        ModelType.Chat | ModelType.Completions,
        endpoint,
        model,
        MODEL,
        worker_type=WorkerType.Aggregated,
        kv_cache_block_size=BLOCK,
        runtime_config=config,
    )
    await endpoint.serve_endpoint(generate)


if __name__ == "__main__":
    asyncio.run(main(Traffic.read(Path(sys.argv[1])), sys.argv[2]))
