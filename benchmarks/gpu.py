"""Decoding on a GPU: the embedded engine beside transformers, and both beside what memory allows.

    python -m benchmarks.gpu [--batches 1 32 256] [--source src]
        [--served | --prefill | --exact | --exact-layers] [--arithmetic close|exact]
        [--dtype bfloat16|float32]

Needs torch, transformers and this source tree, nothing else installed; with `--served`, which
measures the whole stack as processes instead, what the package depends on. The model is a random
Qwen3 of 0.6 B parameters, in bf16 unless told otherwise (served, always); prompts have 512 tokens
and 128 are drawn at temperature 1. Figures are tokens per second while every request of the batch
decodes. The limit is what the device's own copy bandwidth allows: all weights, and the keys and
values of all sequences, read once per token.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

PROMPT, TOKENS = 512, 128
SIZES = {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151_936,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
Prompts = list[list[int]]


def rate(times: list[list[float]]) -> float:
    """Tokens per second while all requests were decoding, from when each token came."""
    begin, end = max(each[0] for each in times), min(each[-1] for each in times)
    if end <= begin:
        raise RuntimeError("the requests never decoded all at once")
    return sum(begin < at <= end for each in times for at in each) / (end - begin)


def lockstep(
    directory: Path, prompts: Prompts, rounds: int, arithmetic: Any, dtype: Any
) -> tuple[float, list[Any]]:
    """Tokens per second of the engine, through its async API, and its last completions."""
    from lockstep.engine import Engine, EngineOptions, EngineRequest
    from lockstep.tokens import Sampling

    engine = Engine(
        directory,
        EngineOptions(
            device="cuda",
            dtype=dtype,
            arithmetic=arithmetic,
            max_seqs=len(prompts),
            max_model_len=PROMPT + TOKENS + 32,
            max_batch_tokens=16 * PROMPT,
            kv_bytes=40 << 30,
        ),
    )
    steps: list[tuple[float, int]] = []
    compute = engine.core.step

    def step() -> None:
        before = engine.core.generated_tokens
        compute()
        steps.append((time.perf_counter(), engine.core.generated_tokens - before))

    engine.core.step = step  # type: ignore[method-assign]

    async def play() -> list[Any]:
        sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
        requests = [EngineRequest(prompt_ids=ids, sampling=sampling) for ids in prompts]
        return [
            completion for (completion,) in await asyncio.gather(*map(engine.generate, requests))
        ]

    async def rounds_of() -> tuple[float, list[Any]]:
        await play()
        rates = []
        for _ in range(rounds):
            steps.clear()
            completions = await play()
            whole = [at for at, drawn in steps if drawn == len(prompts)]
            rates.append(rate([whole] * len(prompts)))
        return median(rates), completions

    engine.start()
    try:
        return asyncio.run(rounds_of())
    finally:
        engine.close()


def prefill(
    model: Any, directory: Path, arithmetic: Any, dtype: Any, length: int = 256, count: int = 32
) -> None:
    """Prints tokens per second of prompts alone, in one step, beside transformers' forward."""
    from lockstep.engine import EngineOptions
    from lockstep.engine.core import Core
    from lockstep.engine.model.model import Segment

    core = Core(
        directory,
        EngineOptions(
            device="cuda",
            dtype=dtype,
            arithmetic=arithmetic,
            max_seqs=count,
            max_model_len=2 * length,
            max_batch_tokens=count * length,
            kv_bytes=8 << 30,
        ),
    )
    print(core.warm_note)
    ids = torch.randint(151_000, (count, length))
    prefiller = core.model.prefiller
    if prefiller is None:
        raise RuntimeError("this device has no ragged prefill")

    def median_ms(run: Any) -> float:
        spent = []
        for _ in range(13):
            begun = time.perf_counter()
            run()
            torch.cuda.synchronize()
            spent.append(1e3 * (time.perf_counter() - begun))
        return median(spent[3:])

    with torch.inference_mode():
        print("| tokens in a step | lockstep ms | tokens/s | transformers (sdpa) ms | tokens/s |")
        print("|" + " --- |" * 5)
        for rows in (1, 4, 16, count):
            segments = [Segment.whole(at, 0, ids[at].tolist()) for at in range(rows)]
            ours = median_ms(lambda: prefiller.run(core.served.weights, segments))  # noqa: B023
            batch = ids[:rows].cuda()
            theirs = median_ms(lambda: model.model(batch))  # noqa: B023
            tokens = rows * length
            cells = [f"{tokens:,}", f"{ours:.2f}", f"{1e3 * tokens / ours:,.0f}"]
            cells += [f"{theirs:.2f}", f"{1e3 * tokens / theirs:,.0f}"]
            print("| " + " | ".join(cells) + " |", flush=True)


def generate(model: Any, prompts: Prompts, rounds: int) -> float:
    """Tokens per second of transformers' generate: a whole run without its first token."""
    ids = torch.tensor(prompts, device="cuda")

    def run(tokens: int) -> float:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
            do_sample=True, top_k=0, top_p=1.0, temperature=1.0, pad_token_id=0,
        )  # fmt: skip
        torch.cuda.synchronize()
        return time.perf_counter() - begun

    run(8)
    return median(len(prompts) * (TOKENS - 1) / (run(TOKENS) - run(1)) for _ in range(rounds))


def continuous(model: Any, prompts: Prompts) -> float:
    """Tokens per second of transformers' continuous batching."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    sampling = GenerationConfig(do_sample=True, temperature=1.0, eos_token_id=-1, pad_token_id=0)
    context = model.continuous_batching_context_manager(
        generation_config=sampling,
        continuous_batching_config=ContinuousBatchingConfig(max_memory_percent=0.5),
    )
    with context as manager:

        def play(tokens: int) -> list[list[float]]:
            requests = manager.add_requests(prompts, tokens, record_timestamps=True)
            times: list[list[float]] = []
            while len(times) < len(requests):
                result = manager.get_result(timeout=120)
                if result is None or result.error is not None:
                    raise RuntimeError(f"no result: {result and result.error}")
                times.append(result.timestamps)
            return times

        play(4)
        return rate(play(TOKENS))


def mismatch(model: Any, completions: list[Any]) -> tuple[float, float]:
    """Mean and largest difference of logprobs, engine against transformers on the same tokens."""
    gaps = []
    for completion in completions[:8]:
        ids = torch.tensor([[*completion.prompt_ids, *completion.token_ids]], device="cuda")
        with torch.inference_mode():
            logits = model(ids).logits[0, len(completion.prompt_ids) - 1 : -1].float()
        logprobs = torch.log_softmax(logits, dim=-1)
        ours = torch.tensor(completion.logprobs, device="cuda")
        gaps.append((logprobs.gather(-1, ids[0, -len(ours) :, None]).squeeze(-1) - ours).abs())
    joined = torch.cat(gaps)
    return float(joined.mean()), float(joined.max())


def bandwidth() -> float:
    """Bytes per second, read and written, of a copy on the device."""
    source = torch.empty(1 << 32, dtype=torch.int8, device="cuda").random_()
    target = torch.empty_like(source)
    spent = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        spent.append(start.elapsed_time(end) / 1e3)
    return float(2 * source.numel() / median(spent))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--served", action="store_true", help="gateway and worker as processes")
    parser.add_argument("--prefill", action="store_true", help="prompts instead of decoding")
    parser.add_argument("--exact", action="store_true", help="prove exact arithmetic, bit by bit")
    parser.add_argument(
        "--exact-layers", action="store_true", help="the same under adapters and with experts"
    )
    parser.add_argument("--arithmetic", choices=("close", "exact"), default="close")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--requests", type=int, default=256, help="of --exact, at most")
    parser.add_argument("--ours-only", action="store_true", help="leave transformers out")
    parser.add_argument("--source", type=Path, default=Path(__file__).parents[1] / "src")
    options = parser.parse_args()
    sys.path.insert(0, str(options.source))

    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    rng = random.Random(0)
    speed = bandwidth()
    torch.cuda.empty_cache()
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, initializer_range=0.02))
    model = model.to(getattr(torch, options.dtype)).eval()
    if options.served:
        from benchmarks import gpu_served

        gpu_served.run(model, options.source, options.batches, options.arithmetic)
        return
    if options.exact or options.exact_layers:
        from benchmarks import gpu_exact

        with tempfile.TemporaryDirectory() as directory:
            model.save_pretrained(directory)
            if options.exact:
                gpu_exact.dense(model, Path(directory), options.dtype, options.requests)
            else:
                gpu_exact.adapters(model, Path(directory), options.dtype)
        if options.exact_layers:
            gpu_exact.experts(options.dtype)
        return
    if options.prefill:
        with tempfile.TemporaryDirectory() as directory:
            model.save_pretrained(directory)
            prefill(model, Path(directory), options.arithmetic, options.dtype)
        return
    weights = sum(each.numel() * each.element_size() for each in model.parameters())
    each = SIZES["num_key_value_heads"] * 128 * model.dtype.itemsize
    per_token = 2 * SIZES["num_hidden_layers"] * each
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {speed / 1e12:.2f} TB/s"
    )
    print(f"weights {weights / 1e9:.2f} GB: at most {speed / weights:,.0f} steps/s\n")
    heading = ["batch", "lockstep", "generate", "cont. batching", "limit", "of the limit"]
    print("| " + " | ".join([*heading, "logprob gap mean, max"]) + " |")
    print("|" + " --- |" * 7, flush=True)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        for batch in options.batches:
            prompts = [[rng.randrange(151_000) for _ in range(PROMPT)] for _ in range(batch)]
            ours, completions = lockstep(
                Path(directory), prompts, options.rounds, options.arithmetic, options.dtype
            )
            torch.cuda.empty_cache()
            gaps = mismatch(model, completions)
            peers = [float("nan")] * 2
            if not options.ours_only:
                peers = [generate(model, prompts, 1), continuous(model, prompts)]
            torch.cuda.empty_cache()
            read = weights + batch * (PROMPT + TOKENS / 2) * per_token
            limit = batch * speed / read
            cells = [f"{batch}", *(f"{each:,.0f}" for each in (ours, *peers, limit))]
            cells += [f"{ours / limit:.0%}", "{:.4f}, {:.3f}".format(*gaps)]
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
