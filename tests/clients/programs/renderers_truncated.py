"""renderers and verifiers: a truncated completion with the sets of its tokens."""

import asyncio
import json
import sys

from openai import AsyncOpenAI
from renderers import create_renderer
from renderers.client import generate
from renderers.configs import Qwen3RendererConfig
from transformers import AutoTokenizer
from verifiers.v1.types import SamplingMask

base, tokenizer = sys.argv[1:3]


async def main() -> dict:
    renderer = create_renderer(AutoTokenizer.from_pretrained(tokenizer), Qwen3RendererConfig())
    client = AsyncOpenAI(base_url=base, api_key="dummy", max_retries=0)
    turn = await generate(
        client=client, renderer=renderer, messages=[{"role": "user", "content": "Reverse: 402"}],
        model="tiny", sampling_params={"temperature": 1.2, "top_p": 0.7, "max_tokens": 24},
    )  # fmt: skip
    mask = SamplingMask.from_sampling_mask(turn["sampling_mask"])
    return {
        "prompt": turn["prompt_ids"],
        "ids": turn["completion_ids"],
        "logprobs": turn["completion_logprobs"],
        "mask_ids": mask.ids.tolist(),
        "counts": mask.counts.tolist(),
    }


print(json.dumps(asyncio.run(main())))
