"""Proves exact arithmetic on a GPU under adapters and with experts: part of `--exact-layers`.

The engine draws tokens in batches of 32 and 1, scores them again as prompts, and a prepared
transformers module (with PEFT's adapter on it) scores them as a trainer would. Every logprob is
compared bit for bit; for experts, so are the experts that were recorded.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_exact import Comparison

REQUESTS, TOKENS = 32, 100
EXPERTS = {
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 3072,
    "moe_intermediate_size": 768,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151_936,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def adapters(model: Any, directory: Path) -> None:
    """The dense model of this benchmark under an adapter of all its layers and its head."""
    from peft import LoraConfig, get_peft_model

    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(
        r=16, lora_alpha=32, target_modules=[*names, "lm_head"], init_lora_weights=False
    )
    torch.manual_seed(1)
    tuned = get_peft_model(model, config, autocast_adapter_dtype=False)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                parameter.mul_(0.2)
    with tempfile.TemporaryDirectory() as place:
        tuned.save_pretrained(place, save_embedding_layers=False)
        _compare("adapter", tuned, directory, Path(place))


def experts() -> None:
    """A random mixture of experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(**EXPERTS, architectures=["Qwen3MoeForCausalLM"])
    model = Qwen3MoeForCausalLM(config).to("cuda", torch.bfloat16).eval()
    with tempfile.TemporaryDirectory() as place:
        model.save_pretrained(place)
        _compare("experts", model, Path(place), None)


def _compare(kind: str, model: Any, directory: Path, adapter: Path | None) -> None:
    from lockstep.engine import Engine, EngineOptions, EngineRequest, exact
    from lockstep.tokens import Sampling

    rng = random.Random(0)
    prompts = [
        [rng.randrange(151_000) for _ in range(rng.randrange(16, 300))] for _ in range(REQUESTS)
    ]
    options = EngineOptions(
        device="cuda", dtype="bfloat16", arithmetic="exact", max_seqs=REQUESTS, max_model_len=512,
        max_batch_tokens=2048, kv_bytes=20 << 30, prefix_cache_bytes=1 << 30,
    )  # fmt: skip
    begun = time.perf_counter()
    engine = Engine(directory, options)
    print(f"\n{kind}: start {time.perf_counter() - begun:.1f} s; {engine.plan}\n")
    print("| the same tokens | logprobs | different | largest difference |\n|---|---|---|---|")
    name = None if adapter is None else "tuned"

    async def play(numbers: list[int]) -> list[Any]:
        requests = [
            EngineRequest(
                prompt_ids=prompts[at],
                sampling=Sampling(max_tokens=TOKENS, ignore_eos=True, seed=at),
                # Every second one plain: batches are mixed.
                adapter=name if at % 2 else None,
                experts_start=None if name else 0,
                skip_prefix_cache=True,
            )
            for at in numbers
        ]
        return [each for (each,) in await asyncio.gather(*map(engine.generate, requests))]

    async def compare() -> list[Any]:
        if adapter is not None:
            await engine.load_adapter("tuned", adapter)
        first = await play(list(range(REQUESTS)))  # kernels of new shapes are compiled here
        begun = time.perf_counter()
        await play(list(range(REQUESTS)))
        rate = REQUESTS * TOKENS / (time.perf_counter() - begun)
        for batch, count in ((REQUESTS, REQUESTS), (7, 28), (1, 6)):
            claim = Comparison(f"in batches of {batch}")
            for start in range(0, count, batch):
                numbers = list(range(start, min(start + batch, count)))
                for at, each in zip(numbers, await play(numbers), strict=True):
                    if each.token_ids != first[at].token_ids:
                        raise RuntimeError(f"request {at} drew other tokens in batches of {batch}")
                    if each.experts != first[at].experts:
                        raise RuntimeError(f"request {at} took other experts: batches of {batch}")
                    claim.add(each.logprobs, first[at].logprobs)
            claim.show()
        claim = Comparison("as prompts")
        for at, each in enumerate(first):
            whole = [*each.prompt_ids, *each.token_ids]
            (values,) = await engine.score_all([whole], adapter=name if at % 2 else None)
            claim.add(values[-TOKENS:], each.logprobs)
        claim.show()
        print(f"| {rate:,.0f} tokens/s at {REQUESTS} | | | |", flush=True)
        return first

    engine.start()
    try:
        first = asyncio.run(compare())
    finally:
        engine.close()
    exact.prepare(model)
    claim = Comparison("by transformers after exact.prepare")
    with torch.no_grad():
        for at, each in enumerate(first):
            if name and not at % 2:
                with model.disable_adapter():
                    row = exact.token_logprobs(model, [*each.prompt_ids, *each.token_ids])
            else:
                row = exact.token_logprobs(model, [*each.prompt_ids, *each.token_ids])
            claim.add(row[-TOKENS:].tolist(), each.logprobs)  # type: ignore[union-attr]
    claim.show()
    if name is None:
        _replay(model, first)


def _replay(model: Any, completions: list[Any]) -> None:
    """Tokens sent to the experts that the engine recorded have the same logprobs."""
    from lockstep.engine import exact
    from lockstep.tokens import Sample, VersionSpan
    from lockstep.train.learning.expert_replay import ExpertReplay

    replay = ExpertReplay(model)
    claim = Comparison("by transformers with the recorded experts")
    with torch.no_grad():
        for each in completions:
            ids = [*each.prompt_ids, *each.token_ids]
            start = len(each.prompt_ids)
            versions = tuple(
                VersionSpan(span.version, start + span.start, start + span.end)
                for span in each.versions
            )
            sampled = [False] * len(each.prompt_ids) + [True] * len(each.token_ids)
            logprobs = [0.0] * len(each.prompt_ids) + each.logprobs
            sample = Sample(
                token_ids=ids,
                sampled_mask=sampled,
                logprobs=logprobs,
                versions=versions,
                experts=each.experts,
            )
            with replay.of([sample], len(ids), model.device):
                row = exact.token_logprobs(model, ids)
            claim.add(row[-TOKENS:].tolist(), each.logprobs)  # type: ignore[union-attr]
    claim.show()
