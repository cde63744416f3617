"""The embedded engine as a contestant, through its async API; arithmetic may be named."""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.engine.play import TOKENS, pin, serve


def main() -> None:
    pin()
    import asyncio

    from lockstep.engine import Engine, EngineOptions, EngineRequest
    from lockstep.tokens import Sampling

    arithmetic: Any = sys.argv[1] if len(sys.argv) > 1 else "auto"
    options = EngineOptions(max_seqs=max(TOKENS), max_model_len=1024, arithmetic=arithmetic)
    engine = Engine("tiny", options)
    engine.start()

    async def complete(prompts: list[list[int]], tokens: int) -> None:
        sampling = Sampling(max_tokens=tokens, ignore_eos=True)
        requests = [EngineRequest(prompt_ids=prompt, sampling=sampling) for prompt in prompts]
        await asyncio.gather(*(engine.generate(request) for request in requests))

    with asyncio.Runner() as runner:
        serve(lambda prompts, tokens: runner.run(complete(prompts, tokens)))
    engine.close()


if __name__ == "__main__":
    main()
