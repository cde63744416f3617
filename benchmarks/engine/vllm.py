"""vLLM as a contestant: its offline engine in one process, which is its best showing on one core.

    .venv-vllm/bin/python -m benchmarks.engine.vllm MODEL

With processes of its own for engine and worker it decodes at half the speed on one core.
"""

from __future__ import annotations

import os
import sys

from benchmarks.engine.play import FEW, PROMPT, TOKENS, pin, serve

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def main() -> None:
    pin()
    os.environ |= SETTINGS
    from vllm import LLM, SamplingParams

    engine = LLM(
        sys.argv[1],
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=max(TOKENS),
        distributed_executor_backend="uni",
        disable_log_stats=True,
        max_num_batched_tokens=PROMPT * 2,
    )

    def generate(prompts: list[list[int]], tokens: int) -> None:
        sampling = SamplingParams(
            max_tokens=tokens, ignore_eos=True, temperature=1.0, logprobs=0, detokenize=False
        )
        results = engine.generate(
            [{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False
        )
        if any(len(result.outputs[0].token_ids) != tokens for result in results):
            raise RuntimeError(f"not every request got {tokens} tokens")

    generate([[1] * PROMPT], FEW)
    serve(generate)


if __name__ == "__main__":
    main()
