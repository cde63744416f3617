"""Small models for real vLLM servers, and what transformers says of their tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from lockstep.checkpoint.probe import Probe, builtin

TOLERANCE = 5e-6
RANK, ALPHA = 4, 8
TARGETS = ("q_proj", "v_proj", "down_proj")
WEIGHTS = "model.safetensors"
VOCABULARY = 512

Rows = list[list[float]]


class Reference:
    """A checkpoint in transformers, float32: the numbers a server must reproduce."""

    def __init__(self, path: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @torch.no_grad()
    def score(self, ids: Sequence[int]) -> list[float]:
        """The logprob of every token after the first."""
        logits = self._model(torch.tensor([list(ids)])).logits[0, :-1].float()
        logprobs = torch.log_softmax(logits, -1)
        return logprobs.gather(1, torch.tensor(list(ids[1:]))[:, None])[:, 0].tolist()

    def rows(self, sequences: Iterable[Sequence[int]]) -> Rows:
        return [self.score(ids) for ids in sequences]


def random(source: Path, target: Path, seed: int, *, only: str = "") -> Path:
    """A checkpoint like `source` with random weights, where the name holds `only`.

    Small enough for logprobs of a few units, whose last bits are below the tolerance.
    """
    tensors = load_file(source / WEIGHTS)
    noise = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        drawn = torch.randn(tensor.shape, generator=noise)
        if only in name:
            tensors[name] = 1 + 0.1 * drawn if tensor.ndim == 1 else 0.08 * drawn
    return written(source, target, tensors)


def written(source: Path, target: Path, tensors: Mapping[str, Tensor], **config: object) -> Path:
    """`source` with these tensors, and with these entries of its config changed."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors", "README.md"))
    save_file(dict(tensors), target / WEIGHTS, metadata={"format": "pt"})
    if config:
        path = target / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return target


def untied(source: Path, target: Path, seed: int) -> Path:
    """The same model with a head of its own."""
    tensors = load_file(source / WEIGHTS)
    embedding = tensors["model.embed_tokens.weight"]
    noise = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(seed))
    tensors["lm_head.weight"] = embedding + 0.1 * embedding.std() * noise
    return written(source, target, tensors, tie_word_embeddings=False)


def probe(path: Path) -> Probe:
    """What a trainer with that checkpoint would ship along."""
    sequences = builtin(VOCABULARY, 512)
    return Probe(sequences, tuple(map(tuple, Reference(path).rows(sequences))), TOLERANCE)


def adapter(source: Path, target: Path, seed: int) -> Path:
    """A LoRA adapter in PEFT's layout; large enough to show."""
    noise = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(source / WEIGHTS).items():
        if name.split(".")[-2] in TARGETS:
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            out, into = weight.shape
            tensors[f"{stem}.lora_A.weight"] = torch.randn(RANK, into, generator=noise) * 0.1
            tensors[f"{stem}.lora_B.weight"] = torch.randn(out, RANK, generator=noise) * 0.1
    target.mkdir(parents=True)
    save_file(tensors, target / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA,
        "target_modules": list(TARGETS), "bias": "none", "base_model_name_or_path": str(source),
    }  # fmt: skip
    (target / "adapter_config.json").write_text(json.dumps(config))
    return target


def merged(source: Path, lora: Path, target: Path) -> Path:
    """The checkpoint that `source` with the adapter amounts to."""
    tensors, parts = load_file(source / WEIGHTS), load_file(lora / "adapter_model.safetensors")
    for name in tensors:
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" in parts:
            product = parts[f"{stem}.lora_B.weight"] @ parts[f"{stem}.lora_A.weight"]
            tensors[name] = tensors[name] + ALPHA / RANK * product
    return written(source, target, tensors)


def furthest(rows: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> float:
    """The largest difference of two sets of logprobs of the same shape."""
    assert [len(row) for row in rows] == [len(row) for row in others]
    return max(
        abs(one - other)
        for row, right in zip(rows, others, strict=True)
        for one, other in zip(row, right, strict=True)
    )
