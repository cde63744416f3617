"""Continuous batching of transformers as a contestant, with blocks enough for what it caches."""

from __future__ import annotations

from benchmarks.engine.play import FEW, PROMPT, TOKENS, pin, serve

PAGE = 16


def main() -> None:
    pin()
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
    from transformers.utils import logging

    from lockstep.models import bundled

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(bundled("tiny"), dtype=torch.float32).eval()
    longest = PROMPT + FEW + max(TOKENS.values()) + PAGE
    sizes = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=3 * max(TOKENS) * longest // PAGE,
        max_batch_tokens=1024,
        use_cuda_graph=False,
    )
    sampling = GenerationConfig(do_sample=True, temperature=1.0, eos_token_id=-1, pad_token_id=0)
    context = model.continuous_batching_context_manager(
        generation_config=sampling, continuous_batching_config=sizes
    )
    with context as manager:

        def generate(prompts: list[list[int]], tokens: int) -> None:
            manager.add_requests(prompts, tokens)
            for _ in prompts:
                result = manager.get_result(timeout=60)
                if result is None or result.error is not None:
                    raise RuntimeError(f"transformers gave no result: {result and result.error}")
                if len(result.generated_tokens) != tokens:
                    raise RuntimeError(f"{len(result.generated_tokens)} tokens, expected {tokens}")

        serve(generate)


if __name__ == "__main__":
    main()
