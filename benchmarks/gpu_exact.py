"""Proves exact arithmetic on a GPU with real requests: part of `benchmarks/gpu.py`, by `--exact`
and `--exact-layers`.

The same requests run in batches of several sizes, their tokens are scored again as prompts in
several cuts and after hits of the prefix cache, and a prepared transformers module scores them as a
trainer would. Every logprob is compared bit for bit; with experts, so are the experts that were
recorded, and they are replayed.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

CUTS = (8192, 1000, 333, 97, 64)
"""Tokens of a step, by which prompts are cut."""
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


class Comparison:
    """Counts equal and different logprobs of one claim."""

    def __init__(self, name: str) -> None:
        self.name, self.count, self.different, self.worst = name, 0, 0, 0.0

    def add(self, ours: list[float], theirs: list[float]) -> None:
        self.count += len(ours)
        gaps = [abs(a - b) for a, b in zip(ours, theirs, strict=True) if a != b]
        self.different += len(gaps)
        self.worst = max([self.worst, *gaps])

    def show(self) -> None:
        print(f"| {self.name} | {self.count:,} | {self.different} | {self.worst:g} |", flush=True)


class Proof:
    """One engine, and requests that it answers again and again.

    With an adapter, every second request runs under it: batches are mixed.
    """

    def __init__(
        self,
        kind: str,
        directory: Path,
        dtype: Any,
        requests: int,
        tokens: int,
        adapter: Path | None = None,
    ) -> None:
        from lockstep.engine import Engine, EngineOptions

        rng = random.Random(0)
        self.tokens, self.adapter = tokens, adapter
        self.prompts = [
            [rng.randrange(151_000) for _ in range(rng.randrange(16, 400))] for _ in range(requests)
        ]
        self.options = EngineOptions(
            device="cuda", dtype=dtype, arithmetic="exact", max_seqs=requests,
            max_model_len=832, max_batch_tokens=32 * requests, kv_bytes=56 << 30,
            prefix_cache_bytes=4 << 30,
        )  # fmt: skip
        begun = time.perf_counter()
        self.engine = Engine(directory, self.options)
        started = f"start {time.perf_counter() - begun:.1f} s; {self.engine.core.warm_note}"
        print(f"\n{kind}: {started}; {self.engine.plan}\n")
        print("| the same tokens | logprobs | different | largest difference |\n|---|---|---|---|")

    def name(self, at: int) -> str | None:
        """The adapter of a request."""
        return "tuned" if self.adapter is not None and at % 2 else None

    async def play(self, numbers: list[int]) -> list[Any]:
        """The completions of these requests, all at once."""
        from lockstep.engine import EngineRequest
        from lockstep.tokens import Sampling

        experts = 0 if self.engine.core.config.moe_layers else None
        requests = [
            EngineRequest(
                prompt_ids=self.prompts[at],
                sampling=Sampling(max_tokens=self.tokens, ignore_eos=True, seed=at),
                adapter=self.name(at),
                experts_start=experts,
                skip_prefix_cache=True,
            )
            for at in numbers
        ]
        return [each for (each,) in await asyncio.gather(*map(self.engine.generate, requests))]

    async def batches(self, sizes: tuple[tuple[int, int], ...]) -> list[Any]:
        """Compares batches of each size, of so many requests, with all at once, and times those."""
        everything = list(range(len(self.prompts)))
        first = await self.play(everything)
        begun = time.perf_counter()
        await self.play(everything)
        rate = len(everything) * self.tokens / (time.perf_counter() - begun)
        for size, count in sizes:
            claim = Comparison(f"in batches of {size}")
            for start in range(0, count, size):
                numbers = list(range(start, min(start + size, count)))
                for at, each in zip(numbers, await self.play(numbers), strict=True):
                    if each.token_ids != first[at].token_ids or each.experts != first[at].experts:
                        raise RuntimeError(f"request {at} went another way in batches of {size}")
                    claim.add(each.logprobs, first[at].logprobs)
            claim.show()
        print(f"| {rate:,.0f} tokens/s at {len(everything)}, prompts too | | | |", flush=True)
        return first

    async def as_prompts(self, first: list[Any], cuts: tuple[int, ...]) -> None:
        """Compares the same tokens, scored as prompts."""
        for cut in cuts:
            self.engine.core.options = replace(self.options, max_batch_tokens=cut)
            claim = Comparison(f"as prompts, {cut} a step")
            some = first if cut > 300 else first[:32]
            for parity in range(1 if self.adapter is None else 2):
                step = 1 if self.adapter is None else 2
                group = some[parity::step]
                scored = await self.engine.score_all(
                    [[*each.prompt_ids, *each.token_ids] for each in group],
                    adapter=self.name(parity),
                )
                for each, values in zip(group, scored, strict=True):
                    claim.add(values[-self.tokens :], each.logprobs)
            claim.show()
        self.engine.core.options = self.options

    async def after_hits(self, first: list[Any]) -> None:
        """Compares tokens drawn after a hit of the prefix cache with the same ones as prompts."""
        from lockstep.engine import EngineRequest
        from lockstep.tokens import Sampling

        claim = Comparison("the last 64 tokens after a hit of the prefix cache")
        for start in range(0, len(first), 64):
            requests = [
                EngineRequest(
                    prompt_ids=[*each.prompt_ids, *each.token_ids[:-64]],
                    sampling=Sampling(max_tokens=64, ignore_eos=True, seed=start + at),
                )
                for at, each in enumerate(first[start : start + 64])
            ]
            hits = self.engine.core.prefixes.hits
            await asyncio.gather(*map(self.engine.generate, requests))
            again = await asyncio.gather(*map(self.engine.generate, requests))
            if self.engine.core.prefixes.hits == hits:
                raise RuntimeError("the prefix cache was never hit")
            results = [each for (each,) in again]
            whole = [[*each.prompt_ids, *each.token_ids] for each in results]
            for each, values in zip(results, await self.engine.score_all(whole), strict=True):
                claim.add(each.logprobs, values[-64:])
        claim.show()

    def by_trainer(self, model: Any, first: list[Any]) -> None:
        """Compares what a prepared transformers module says of the same tokens."""
        from lockstep.engine import exact

        exact.prepare(model)
        claim = Comparison("by transformers after exact.prepare")
        step = 4 if self.adapter is None else 1
        with torch.no_grad():
            for start in range(0, len(first), step):
                group = first[start : start + step]
                plain = self.adapter is not None and self.name(start) is None
                with model.disable_adapter() if plain else nullcontext():
                    rows = exact.token_logprobs(
                        model, [[*each.prompt_ids, *each.token_ids] for each in group]
                    )
                for each, row in zip(group, rows, strict=True):
                    claim.add(row[-self.tokens :].tolist(), each.logprobs)
        claim.show()

    def replayed(self, model: Any, first: list[Any]) -> None:
        """Compares tokens that a trainer sends to the experts which the engine recorded."""
        from lockstep.engine import exact
        from lockstep.engine.expert_replay import ExpertReplay
        from lockstep.tokens import Sample, VersionSpan

        replay = ExpertReplay(model)
        claim = Comparison("by transformers with the recorded experts")
        with torch.no_grad():
            for each in first:
                start, ids = len(each.prompt_ids), [*each.prompt_ids, *each.token_ids]
                sample = Sample(
                    token_ids=ids,
                    sampled_mask=[False] * start + [True] * len(each.token_ids),
                    logprobs=[0.0] * start + each.logprobs,
                    versions=tuple(
                        VersionSpan(span.version, start + span.start, start + span.end)
                        for span in each.versions
                    ),
                    experts=each.experts,
                )
                with replay.of([sample], len(ids), model.device):
                    row = exact.token_logprobs(model, ids)
                claim.add(row[-self.tokens :].tolist(), each.logprobs)  # type: ignore[union-attr]
        claim.show()


def dense(model: Any, directory: Path, dtype: Any, requests: int) -> None:
    """Prints a line for every way in which the same tokens were computed."""
    proof = Proof("dense", directory, dtype, requests, 400)

    async def compare() -> list[Any]:
        sizes = ((256, 256), (32, 256), (7, 70), (1, 12))
        first = await proof.batches(
            tuple((min(size, requests), min(count, requests)) for size, count in sizes)
        )
        await proof.as_prompts(first, tuple(min(cut, 32 * requests) for cut in CUTS))
        await proof.after_hits(first)
        return first

    proof.by_trainer(model, _run(proof, compare))


def adapters(model: Any, directory: Path, dtype: Any) -> None:
    """The same model under an adapter of all its layers and its head."""
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
        proof = Proof("under an adapter", directory, dtype, 32, 100, Path(place))

        async def compare() -> list[Any]:
            await proof.engine.load_adapter("tuned", Path(place))
            first = await proof.batches(((32, 32), (7, 28), (1, 6)))
            await proof.as_prompts(first, (1024, 97))
            return first

        proof.by_trainer(tuned, _run(proof, compare))


def experts(dtype: Any) -> None:
    """A random mixture of experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(**EXPERTS, architectures=["Qwen3MoeForCausalLM"])
    with torch.device("cuda"):
        model = Qwen3MoeForCausalLM(config).to(getattr(torch, dtype)).eval()
    with tempfile.TemporaryDirectory() as place:
        model.save_pretrained(place)
        proof = Proof("experts", Path(place), dtype, 32, 100)

        async def compare() -> list[Any]:
            first = await proof.batches(((32, 32), (7, 28), (1, 6)))
            await proof.as_prompts(first, (1024, 97))
            return first

        first = _run(proof, compare)
    proof.by_trainer(model, first)
    proof.replayed(model, first[:8])


def _run(proof: Proof, compare: Any) -> list[Any]:
    proof.engine.start()
    try:
        first: list[Any] = asyncio.run(compare())
    finally:
        proof.engine.close()
    return first
