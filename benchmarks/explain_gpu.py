"""Seconds and verdicts of `lockstep.explain` for a model of 0.6 billion weights on a GPU.

python benchmarks/explain_gpu.py [--dtype bfloat16]

The weights are random, in the shapes of Qwen3-0.6B; faults are injected into the embedded engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from lockstep.engine import Engine, EngineOptions, EngineRequest
from lockstep.explain.run import explain
from lockstep.tokens import Sample, Sampling, VersionSpan

SHAPE = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "tie_word_embeddings": True, "max_position_embeddings": 4096,
}  # fmt: skip
PROMPTS, PROMPT, TOKENS = 12, 96, 32


def checkpoints(folder: Path) -> tuple[Path, Path, Path]:
    """Write weights before and after an update, and those after it with one layer from before."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**SHAPE), dtype=torch.float32)
    old = {name: p.data.clone() for name, p in model.named_parameters() if p.dim() > 1}
    old = {name: tensor * 2 if "embed" in name else tensor for name, tensor in old.items()}
    rest = {name: p.data for name, p in model.named_parameters() if p.dim() == 1}
    new = {name: t + 0.05 * t.std() * torch.randn(t.shape) for name, t in old.items()}
    mixed = {name: old[name] if ".layers.17." in name else t for name, t in new.items()}
    paths = []
    for name, tensors in (("step-1", old), ("step-2", new), ("mixed", mixed)):
        path = folder / name
        path.mkdir()
        model.config.architectures = ["Qwen3ForCausalLM"]
        model.config.save_pretrained(path)
        whole = {key: t.bfloat16().contiguous() for key, t in (tensors | rest).items()}
        save_file(whole, path / "model.safetensors", metadata={"format": "pt"})
        paths.append(path)
    return paths[0], paths[1], paths[2]


async def rollout(directory: Path, dtype: Any, **sampling: Any) -> list[Sample]:
    options = EngineOptions(
        device="cuda", dtype=dtype, max_model_len=512, max_seqs=16, warm_seconds=60
    )
    rng = torch.Generator().manual_seed(1)
    prompts = [torch.randint(151000, (PROMPT,), generator=rng).tolist() for _ in range(PROMPTS)]
    async with Engine(directory, options) as engine:
        drawn = [
            engine.generate(
                EngineRequest(
                    prompt_ids=prompt,
                    sampling=Sampling(max_tokens=TOKENS, ignore_eos=True, seed=at, **sampling),
                )
            )
            for at, prompt in enumerate(prompts)
        ]
        return [
            Sample(
                token_ids=[*prompt, *done.token_ids],
                sampled_mask=[False] * PROMPT + [True] * TOKENS,
                logprobs=[0.0] * PROMPT + done.logprobs,
                versions=(VersionSpan("step-2", PROMPT, PROMPT + TOKENS),),
                logprob_mode="processed",
                temperature=done.temperature,
            )
            for prompt, (done,) in zip(prompts, await asyncio.gather(*drawn), strict=True)
        ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="bfloat16")
    dtype = parser.parse_args().dtype
    folder = Path(tempfile.mkdtemp())
    try:
        old, new, mixed = checkpoints(folder)
        for name, directory, sampling in (
            ("clean", new, {}), ("update skipped", old, {}), ("layer 17 stale", mixed, {}),
            ("temperature 0.6", new, {"temperature": 0.6}), ("top_k 50", new, {"top_k": 50}),
        ):  # fmt: skip
            samples = asyncio.run(rollout(directory, dtype, **sampling))
            torch.cuda.empty_cache()
            samples = [replace(sample, temperature=1.0) for sample in samples]
            started = time.perf_counter()
            verdict = explain(samples, new, others=[old], engine_dtype=dtype, device="cuda")
            seconds = time.perf_counter() - started
            row = {"fault": name, "cause": verdict.cause, "outcome": verdict.outcome,
                   "sentence": verdict.sentence, "seconds": round(seconds, 1),
                   "passes": verdict.passes, "mean": verdict.mean, "band": verdict.band,
                   "where": [cause.location for cause in verdict.causes]}  # fmt: skip
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
