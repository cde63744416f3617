"""The weights of a transformers model, changed for one forward pass and restored after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from lockstep.checkpoint.adapter import FACTOR, WEIGHTS, AdapterFiles
from lockstep.checkpoint.open import open_checkpoint
from lockstep.checkpoint.tensor_names import EMBEDDING, HEAD
from lockstep.engine.weights.read import read_tensor
from lockstep.explain.rounding import round_weight
from lockstep.explain.setting import Overlay, Setting
from lockstep.tokens.errors import AdapterError, CheckpointError


class ModelState:
    """The parameters of one model by their names in checkpoints.

    Fused experts are found by the names of single ones. A tied head is untied, because an engine
    may hold another copy of it than of the embedding: `lm_head.weight` is always a tensor of its
    own here.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        head = model.get_output_embeddings()
        if head.weight is model.get_input_embeddings().weight:
            head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        self.views = dict(_views(model))
        self._saved: dict[str, Tensor] = {}

    @cached_property
    def linear_names(self) -> tuple[str, ...]:
        """The weights that engines quantise: all matrices but embedding, head and routers."""
        return tuple(
            name
            for name, view in self.views.items()
            if view.dim() == 2 and name not in (EMBEDDING, HEAD) and ".mlp.gate.weight" not in name
        )

    @contextmanager
    def under(self, setting: Setting) -> Iterator[None]:
        """Apply what the setting changes in weights and configuration within the block."""
        undo = self._configure(setting)
        try:
            if setting.overlay is not None:
                self._overlay(setting.overlay)
            if setting.adapter is not None:
                self._merge(setting.adapter, setting.adapter_scale)
            if setting.jitter:
                self._jitter(setting.jitter)
            if setting.rounding is not None:
                names = tuple(self.views)
                if setting.rounding not in ("bfloat16", "float16"):
                    names = self.linear_names
                for name in names:
                    self._change(name, round_weight(self.views[name], setting.rounding))
            yield
        finally:
            for name, tensor in self._saved.items():
                self.views[name].copy_(tensor)
            self._saved.clear()
            for target, field, value in undo:
                setattr(target, field, value)

    def differing(self, source: Path) -> list[str]:
        """Return the names of tensors whose values in `source` differ from the model's own."""
        names = []
        for name, tensor in self._tensors(source, Overlay(source)):
            view = self.views[name]
            if not torch.equal(tensor.to(view.device, view.dtype), view):
                names.append(name)
        return names

    def _change(self, name: str, tensor: Tensor) -> None:
        view = self.views[name]
        if name not in self._saved:
            self._saved[name] = view.clone()
        view.copy_(tensor)

    def _overlay(self, overlay: Overlay) -> None:
        for name, tensor in self._tensors(overlay.source, overlay):
            self._change(name, tensor)

    def _tensors(self, source: Path, overlay: Overlay) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that the overlay takes. Raises CheckpointError for other shapes."""
        reader = open_checkpoint(source)
        for name, view in self.views.items():
            if not overlay.takes(name):
                continue
            held = EMBEDDING if name == HEAD and HEAD not in reader.tensors else name
            if held not in reader.tensors:
                raise CheckpointError(f"{source} has no tensor {held!r}: it is of another model")
            tensor = read_tensor(reader, held)
            if tensor.shape != view.shape:
                raise CheckpointError(
                    f"tensor {held!r} of {source} has shape {tuple(tensor.shape)}, expected "
                    f"{tuple(view.shape)}: it is of another model"
                )
            yield name, tensor

    def _merge(self, adapter: Path, scale: float) -> None:
        """Add the update of an adapter to the weights. Raises AdapterError if it does not fit."""
        settings = AdapterFiles.read(adapter).settings
        rank, alpha = float(settings["r"]), float(settings["lora_alpha"])
        scale *= alpha / (rank**0.5 if settings.get("use_rslora") else rank)
        factors: dict[str, dict[str, Tensor]] = {}
        for name, tensor in load_file(adapter / WEIGHTS).items():
            if match := FACTOR.fullmatch(name):
                factors.setdefault(match[1] + ".weight", {})[match[2]] = tensor.float()
        for name, pair in factors.items():
            if name not in self.views:
                raise AdapterError(f"{adapter} updates {name!r}, which the checkpoint has not")
            view = self.views[name]
            update = (pair["B"] @ pair["A"]).to(view.device)
            self._change(name, (view.float() + scale * update).to(view.dtype))

    def _jitter(self, size: float) -> None:
        rng = torch.Generator().manual_seed(0)
        for name, view in self.views.items():
            noise = torch.randn(view.shape, generator=rng).to(view.device)
            self._change(name, (view.float() * (1 + size * noise)).to(view.dtype))

    def _configure(self, setting: Setting) -> list[tuple[Any, str, Any]]:
        """Change values that are no tensors of the checkpoint; return how to undo it."""
        undo: list[tuple[Any, str, Any]] = []

        def put(target: Any, field: str, value: Any) -> None:
            undo.append((target, field, getattr(target, field)))
            setattr(target, field, value)

        config = self._model.config.get_text_config()
        if setting.rope_theta is not None or setting.rope_factor != 1 or setting.plain_rope:
            rotary = self._model.model.rotary_emb
            rope = getattr(config, "rope_parameters", None) or {}
            theta = setting.rope_theta or float(rope.get("rope_theta", 10_000.0))
            width = 2 * len(rotary.inv_freq)
            exponents = torch.arange(0, width, 2).float() / width
            put(rotary, "inv_freq", (1.0 / theta**exponents / setting.rope_factor)
                .to(rotary.inv_freq.device))  # fmt: skip
            put(rotary, "attention_scaling", 1.0)
        for module in self._model.modules():
            if setting.eps is not None and hasattr(module, "variance_epsilon"):
                put(module, "variance_epsilon", setting.eps)
            if setting.normalize_experts is not None and hasattr(module, "norm_topk_prob"):
                put(module, "norm_topk_prob", setting.normalize_experts)
        return undo


def _views(model: Any) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        data = parameter.data
        if name.endswith("experts.gate_up_proj"):
            at, half = name.removesuffix("gate_up_proj"), data.shape[1] // 2
            for expert, rows in enumerate(data):
                yield f"{at}{expert}.gate_proj.weight", rows[:half]
                yield f"{at}{expert}.up_proj.weight", rows[half:]
        elif name.endswith("experts.down_proj"):
            for expert, rows in enumerate(data):
                yield f"{name.removesuffix('down_proj')}{expert}.down_proj.weight", rows
        else:
            yield name, data
