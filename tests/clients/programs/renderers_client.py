"""renderers: its own generate client, which renders, bridges and parses by itself."""

import asyncio
import json
import sys

from openai import AsyncOpenAI
from renderers import create_renderer
from renderers.client import generate
from renderers.configs import Qwen3RendererConfig
from transformers import AutoTokenizer

base, tokenizer, session = sys.argv[1:4]
TOOLS = [
    {
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
]


async def main() -> dict:
    renderer = create_renderer(
        AutoTokenizer.from_pretrained(tokenizer), Qwen3RendererConfig(thinking_retention="all")
    )
    client = AsyncOpenAI(base_url=base, api_key="dummy", max_retries=0)
    messages = [{"role": "user", "content": "What is 417 + 86, and then times 3?"}]
    ids = renderer.render_ids(messages, tools=TOOLS, add_generation_prompt=True)
    bridged = 0
    while True:
        turn = await generate(
            client=client, renderer=renderer, messages=messages, model="tiny", prompt_ids=ids,
            tools=TOOLS, sampling_params={"temperature": 1.0, "max_tokens": 200}, cache_salt="1",
            extra_headers={"X-Session-ID": session},
        )  # fmt: skip
        whole = turn["prompt_ids"] + turn["completion_ids"]
        if not turn["tool_calls"]:
            return {"answer": turn["content"], "ids": whole, "bridged": bridged}
        results = [
            {
                "role": "tool",
                "tool_call_id": call.id or "call_0",
                "content": str(eval(call.arguments["expression"])),
            }
            for call in turn["tool_calls"]
        ]
        messages += [{"role": "assistant", "content": turn["content"]}, *results]
        bridge = renderer.bridge_to_next_turn(
            turn["prompt_ids"], turn["completion_ids"], results, tools=TOOLS
        )
        ids, bridged = list(bridge.token_ids), bridged + 1


print(json.dumps(asyncio.run(main())))
