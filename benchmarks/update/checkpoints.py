"""Random Qwen3 checkpoints of a given size, saved as a trainer saves them, with a probe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from lockstep.engine import exact
from lockstep.engine.probe import save_checkpoint


@dataclass(frozen=True, slots=True)
class Size:
    """A shape of Qwen3 that takes about `name` in fp32. Most of it is embedding and head, as in
    small real models, so that one core can decode it."""

    name: str
    vocab: int
    hidden: int
    layers: int
    head_dim: int = 64

    def checkpoint(self, directory: Path, seed: int) -> Path:
        """Weights of that seed: every tensor differs from those of another one."""
        from transformers import Qwen3Config, Qwen3ForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        torch.manual_seed(seed)
        heads = self.hidden // self.head_dim
        config = Qwen3Config(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=3 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            head_dim=self.head_dim,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
        )
        with torch.device("cpu"):
            model = Qwen3ForCausalLM(config).float().eval()
        for parameter in model.parameters():  # norms too: they start as ones
            parameter.data.add_(torch.randn_like(parameter), alpha=0.02)
        return save_checkpoint(exact.prepare(model), directory, version=directory.name)
