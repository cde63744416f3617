"""LoRA adapters of many training clients over one base model, applied one at a time.

The arithmetic is that of the engine's adapters: the same products, padded to the same row multiple
and added in the same order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from lockstep.engine.exact import products_of
from lockstep.engine.numerics.block_shapes import MULTIPLES, row_multiple, steady_products
from lockstep.tokens.errors import BadRequest, CheckpointError

ALPHA = 32.0
"""The lora_alpha of every adapter. The API does not send it, and the cookbook assumes 32."""
CLOSE_TOLERANCE = 1e-3
"""Maximum difference of sampler and trainer logprobs in close mode, as in `lockstep train`."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
HEAD = "lm_head"
WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """The rank of an adapter, and the weights that it updates."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    @property
    def targets(self) -> tuple[str, ...]:
        """The names of the modules that the adapter updates."""
        return (
            *(ATTENTION if self.train_attn else ()),
            *(MLP if self.train_mlp else ()),
            *((HEAD,) if self.train_unembed else ()),
        )


class LoraTensors:
    """The factors A and B of each update, by the name of its module. B starts at zero."""

    def __init__(self, model: LoraModel, settings: LoraSettings) -> None:
        """Raises BadRequest for a rank or targets that this model cannot have."""
        model.check(settings)
        self.settings = settings
        source = torch.Generator()
        if settings.seed is None:
            source.seed()
        else:
            source.manual_seed(settings.seed)
        self.pairs: dict[str, tuple[Tensor, Tensor]] = {}
        for name, module in model.modules_of(settings).items():
            bound = 1 / math.sqrt(module.in_features)
            a = torch.empty(settings.rank, module.in_features).uniform_(
                -bound, bound, generator=source
            )
            b = torch.zeros(module.out_features, settings.rank)
            self.pairs[name] = (
                a.to(model.device).requires_grad_(),
                b.to(model.device).requires_grad_(),
            )

    @property
    def scaling(self) -> float:
        """The factor of the updates."""
        return ALPHA / self.settings.rank

    @property
    def parameters(self) -> list[Tensor]:
        """All tensors, in the same order in every process."""
        return [tensor for pair in self.pairs.values() for tensor in pair]

    @property
    def names(self) -> list[str]:
        """The names of `parameters` as PEFT writes them."""
        return [
            f"base_model.model.{name}.lora_{side}.weight" for name in self.pairs for side in "AB"
        ]

    def save(self, directory: Path) -> None:
        """Write an adapter directory as PEFT does."""
        tensors = {
            name: tensor.detach().cpu().contiguous()
            for name, tensor in zip(self.names, self.parameters, strict=True)
        }
        save_file(tensors, directory / WEIGHTS)
        settings = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": self.settings.rank,
            "lora_alpha": ALPHA, "target_modules": list(self.settings.targets), "bias": "none",
            "lora_dropout": 0.0,
        }  # fmt: skip
        (directory / SETTINGS).write_text(json.dumps(settings))

    def load(self, directory: Path) -> None:
        """Load the values saved in `directory`. Raises CheckpointError unless all of them fit."""
        stored = load_file(directory / WEIGHTS)
        shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
        own = {n: tuple(t.shape) for n, t in zip(self.names, self.parameters, strict=True)}
        if shapes != own:
            name, shape = sorted(set(shapes.items()) ^ set(own.items()))[0]
            raise CheckpointError(
                f"the saved weights do not fit this model: only one of them has {name} of shape "
                f"{shape}; create the model with the rank and train_* flags of the checkpoint"
            )
        with torch.no_grad():
            for name, tensor in zip(self.names, self.parameters, strict=True):
                tensor.copy_(stored[name])


class LoraModel:
    """A frozen transformers model whose linear layers add the update of the applied adapter."""

    def __init__(self, model: Any, *, is_exact: bool, max_rank: int) -> None:
        """With `is_exact`, `model` must have been prepared by `exact.prepare`."""
        self.model = model.requires_grad_(False)
        self.workers_agree = True
        """Whether the workers compute the same bits as this model."""
        self.close_tolerance: float | None = CLOSE_TOLERANCE
        """Tolerance of the probe otherwise; None lets the fleet measure it."""
        self.max_rank = max_rank
        self._exact = is_exact
        self._text = model.config.get_text_config()
        self._applied: LoraTensors | None = None
        self._multiple = 1
        self._linears = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear)
            and name.rpartition(".")[2] in (*ATTENTION, *MLP, HEAD)
        }
        for name, module in self._linears.items():
            forward = partial(self._forward, name, module.forward)
            module.forward = forward  # type: ignore[method-assign]

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    def row_multiple(self, rank: int) -> int:
        """Return the row multiple of products of an adapter of that rank; 1 in close mode."""
        if not self._exact or self.device.type != "cpu":
            return 1
        return row_multiple(products_of(self._text).with_lora(rank)) or MULTIPLES[-1]

    def is_exact_at(self, rank: int) -> bool:
        """Whether workers compute the same bits under an adapter of that rank."""
        if not self._exact or not self.workers_agree or self.device.type != "cpu":
            return False
        return bool(row_multiple(products_of(self._text).with_lora(rank)))

    def check(self, settings: LoraSettings) -> None:
        """Raise BadRequest for settings that cannot be trained or served."""
        if not 1 <= settings.rank <= self.max_rank:
            raise BadRequest(
                f"lora_config.rank is {settings.rank}: expected 1 to {self.max_rank}; for higher "
                "ranks start the server with --max-lora-rank RANK",
                param="lora_config.rank",
            )
        if not settings.targets:
            raise BadRequest(
                "train_attn, train_mlp and train_unembed are all false: nothing would be trained",
                param="lora_config",
            )
        if settings.train_mlp and getattr(self._text, "num_experts", None):
            raise BadRequest(
                "lora_config.train_mlp is true, but adapters of experts cannot be served: create "
                "the model with train_mlp=False",
                param="lora_config.train_mlp",
            )

    def modules_of(self, settings: LoraSettings) -> dict[str, torch.nn.Linear]:
        """Return the linear layers that these settings update, by their full names."""
        return {
            name: module
            for name, module in self._linears.items()
            if name.rpartition(".")[2] in settings.targets
        }

    @contextmanager
    def applying(self, tensors: LoraTensors | None) -> Iterator[Any]:
        """Apply this adapter, or none, within the block; yield the model."""
        rank = tensors.settings.rank if tensors else 1
        self._applied, self._multiple = tensors, self.row_multiple(rank)
        try:
            with steady_products(products_of(self._text).with_lora(rank)):
                yield self.model
        finally:
            self._applied = None

    def _forward(self, name: str, base: Any, x: Tensor) -> Tensor:
        out: Tensor = base(x)
        pair = self._applied.pairs.get(name) if self._applied else None
        if self._applied is None or pair is None:
            return out
        # Padded to the row multiple, as the engine pads: MKL rounds other row counts differently.
        rows = x.reshape(-1, x.shape[-1])
        count = rows.shape[0]
        padded = F.pad(rows, (0, 0, 0, -count % self._multiple))
        low = F.linear(padded, pair[0].to(x.dtype))
        part = F.linear(low, pair[1].to(x.dtype))[:count] * self._applied.scaling
        return out + part.view(out.shape)
