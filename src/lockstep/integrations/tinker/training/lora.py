"""LoRA tensors of many training clients over one base model, of which one at a time is applied.

The arithmetic is that of the engine's adapters: the same products, in numbers of rows that keep the
bits, added in the same order.
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
"""The lora_alpha of every adapter: it is not on the wire, and the cookbook assumes 32."""
CLOSE_TOLERANCE = 1e-3
"""How far a sampler may be from the trainer where bits cannot be equal, as in `lockstep train`."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
HEAD = "lm_head"
WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Which weights of the model an adapter updates, and with what rank."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    @property
    def targets(self) -> tuple[str, ...]:
        """The names of the modules that get an update."""
        return (
            *(ATTENTION if self.train_attn else ()),
            *(MLP if self.train_mlp else ()),
            *((HEAD,) if self.train_unembed else ()),
        )


class LoraTensors:
    """The two factors of each update, by the name of its module; B begins at zero."""

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
            first, second = (each.to(model.device).requires_grad_() for each in (a, b))
            self.pairs[name] = first, second

    @property
    def scaling(self) -> float:
        """What the updates are multiplied by."""
        return ALPHA / self.settings.rank

    @property
    def parameters(self) -> list[Tensor]:
        """All tensors, in an order that is the same in every process."""
        return [tensor for pair in self.pairs.values() for tensor in pair]

    @property
    def names(self) -> list[str]:
        """The name of each of `parameters`, as PEFT writes it."""
        return [
            f"base_model.model.{name}.lora_{side}.weight" for name in self.pairs for side in "AB"
        ]

    def save(self, directory: Path) -> None:
        """Writes a directory as PEFT does."""
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
        """Takes the values that were saved there. Raises CheckpointError unless all fit."""
        stored = load_file(directory / WEIGHTS)
        shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
        own = {n: tuple(t.shape) for n, t in zip(self.names, self.parameters, strict=True)}
        if shapes != own:
            odd = sorted(set(shapes.items()) ^ set(own.items()))[0]
            raise CheckpointError(
                f"the saved weights do not fit this model: {odd[0]} of shape {odd[1]} is in one of "
                "them only (create the model with the rank and the train_* flags of the checkpoint)"
            )
        with torch.no_grad():
            for name, tensor in zip(self.names, self.parameters, strict=True):
                tensor.copy_(stored[name])


class LoraModel:
    """A frozen transformers model whose linear layers add the update that is applied now."""

    def __init__(self, model: Any, *, is_exact: bool, max_rank: int) -> None:
        """`model` was made exact before, where it is to be so."""
        self.model = model.requires_grad_(False)
        self.workers_agree = True
        """Whether those who serve the adapters compute as this model does."""
        self.close_tolerance: float | None = CLOSE_TOLERANCE
        """How far they may be off where they do not; None has the fleet measure it."""
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
        """The row multiple of products of an adapter of that rank; 1 where bits do not count."""
        if not self._exact or self.device.type != "cpu":
            return 1
        return row_multiple(products_of(self._text).with_lora(rank)) or MULTIPLES[-1]

    def is_exact_at(self, rank: int) -> bool:
        """Whether workers have the same logprobs under an adapter of that rank bit for bit."""
        if not self._exact or not self.workers_agree or self.device.type != "cpu":
            return False
        return bool(row_multiple(products_of(self._text).with_lora(rank)))

    def check(self, settings: LoraSettings) -> None:
        """Raises BadRequest for what cannot be trained here, or not be served afterwards."""
        if not 1 <= settings.rank <= self.max_rank:
            raise BadRequest(
                f"lora_config.rank is {settings.rank}: expected 1 to {self.max_rank}",
                param="lora_config.rank",
            )
        if not settings.targets:
            raise BadRequest(
                "train_attn, train_mlp and train_unembed are all false: nothing would be trained",
                param="lora_config",
            )
        if settings.train_mlp and getattr(self._text, "num_experts", None):
            raise BadRequest(
                "lora_config.train_mlp is true, but adapters of experts are not served here: "
                "create the model with train_mlp=False",
                param="lora_config.train_mlp",
            )

    def modules_of(self, settings: LoraSettings) -> dict[str, torch.nn.Linear]:
        """The linear layers that these settings update, by their full names."""
        return {
            name: module
            for name, module in self._linears.items()
            if name.rpartition(".")[2] in settings.targets
        }

    @contextmanager
    def applying(self, tensors: LoraTensors | None) -> Iterator[Any]:
        """The model with this adapter on, or with none, within the block."""
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
        rows = x.reshape(-1, x.shape[-1])
        count = rows.shape[0]
        padded = F.pad(rows, (0, 0, 0, -count % self._multiple))
        low = F.linear(padded, pair[0].to(x.dtype))
        part = F.linear(low, pair[1].to(x.dtype))[:count] * self._applied.scaling
        return out + part.view(out.shape)
