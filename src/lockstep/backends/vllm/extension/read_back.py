"""Read-back of the weights that a vLLM model computes with, compared with those it was given.

The kernel of a linear layer may hold nothing but an opaque packed copy of its weights. An identity
matrix multiplied by the layer's own kernel returns them exactly, whatever the layout: each element
of the product is one weight times 1 plus zeros, which rounds to itself. Other parameters (norms,
embeddings) are compared in place, and experts in the layout that their kernel reads.

Names and splits are computed here and not by vLLM's loaders, whose errors are to be found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.utils import PPMissingLayer

from lockstep.backends.vllm.extension.expert_layout import ExpertLayer, expert_layers
from lockstep.checkpoint.tensor_names import DERIVED, EMBEDDING, HEAD
from lockstep.protocol.control.read_back import Difference, ReadBack

BLOCK = 1 << 23
"""Largest number of elements of an identity block or of its product: 32 MiB in float32."""
QKV = ("q", "k", "v")
LORA_WRAPPER = ".base_layer"
"""Path of a layer inside the wrapper that vLLM puts around it for adapters."""

Span = tuple[int, int]


class Unreadable(Exception):
    """Reason why a parameter cannot be read back."""


@dataclass
class Comparison:
    """Counts of compared and different elements by tensor, filled while reading back."""

    tensors: dict[str, tuple[int, int]] = field(default_factory=dict)
    first: Difference | None = None
    unread: dict[str, str] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def attempt(self, names: Iterable[str]) -> Iterator[None]:
        """Report tensors as not read back where the block of code raises.

        Any error: the layers of some models are not known here, and an update must not fail for
        that. A worker with tensors that were not read back is not believed to hold them.
        """
        try:
            yield
        except Exception as error:
            reason = str(error) if isinstance(error, Unreadable) else repr(error)
            self.unread |= dict.fromkeys(names, reason)

    def compare(self, name: str, held: Any, expected: Any, start: Span = (0, 0)) -> None:
        """Compare a part of a tensor, which begins at row and column `start`."""
        right = expected.to(device=held.device, dtype=held.dtype)
        different = held != right
        count = int(different.sum())
        if count and held.dtype in (torch.float32, torch.bfloat16):
            # A kernel may round subnormal numbers (below 1e-38) to zero.
            tiny = torch.finfo(held.dtype).tiny
            different &= (held.abs() >= tiny) | (right.abs() >= tiny) | held.isnan()
            count = int(different.sum())
        compared, before = self.tensors.get(name, (0, 0))
        self.tensors[name] = (compared + held.numel(), before + count)
        if count and self.first is None:
            place = different.nonzero()[0].tolist()
            values = (float(held[tuple(place)]), float(right[tuple(place)]))
            offsets = (*start, *[0] * held.ndim)
            index = tuple(at + offset for at, offset in zip(place, offsets, strict=False))
            self.first = Difference(name, index, *values)

    def report(self, seconds: float) -> ReadBack:
        return ReadBack(
            self.tensors, self.first, self.unread, tuple(self.absent), self.sizes, seconds
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """A checkpoint tensor inside a parameter: its rows there and the rows and columns it has.

    `rows` are those of the parameter, `source` those of the tensor; `columns` are the columns of
    the tensor that this rank holds, None for all.
    """

    name: str
    rows: Span
    source: Span
    columns: Span | None = None


def read_back(model: Any, tensors: Mapping[str, Any], *, tied: bool) -> ReadBack:
    """Compare all weights that the model computes with to `tensors`, those of the checkpoint.

    The model must not run meanwhile. Needs at most a few blocks of memory (see BLOCK), and one
    expert's weights.
    """
    started = perf_counter()
    comparison = Comparison()
    with torch.inference_mode():
        _Reader(model, tensors, comparison, tied=tied).read()
    return comparison.report(round(perf_counter() - started, 6))


class _Reader:
    """One read-back: the modules by path, and the tensors that each parameter consists of."""

    def __init__(
        self, model: Any, tensors: Mapping[str, Any], comparison: Comparison, *, tied: bool
    ) -> None:
        self._model, self._comparison, self._tied = model, comparison, tied
        self._tensors = {
            name: tensor for name, tensor in tensors.items() if not name.endswith(DERIVED)
        }
        self._modules = {
            path.replace(LORA_WRAPPER, ""): module
            for path, module in model.named_modules(remove_duplicate=False)
            if not hasattr(module, "base_layer")
        }
        self._missing = [
            f"{path}." for path, module in self._modules.items()
            if isinstance(module, PPMissingLayer)
        ]  # fmt: skip

    def read(self) -> None:
        experts = expert_layers(self._modules)
        parameters: dict[tuple[str, str], list[tuple[str, object]]] = {}
        for name in self._tensors:
            layer = next((layer for layer in experts if layer.owns(name)), None)
            if layer is not None:
                layer.add(name)
                continue
            with self._comparison.attempt([name]):
                path, shard = self._locate(name)
                module, _, attribute = path.rpartition(".")
                if module in self._modules:
                    parameters.setdefault((module, attribute), []).append((name, shard))
                elif any(path.startswith(prefix) for prefix in self._missing):
                    self._comparison.absent.append(name)
                else:
                    raise Unreadable(f"the model has no module {module!r}")
        for (path, attribute), sources in parameters.items():
            self._parameter(self._modules[path], attribute, sources)
        for layer in experts:
            self._experts(layer)
        if self._tied and EMBEDDING in self._tensors:
            self._tied_head()
        self._derived()
        self._comparison.sizes |= {name: t.numel() for name, t in self._tensors.items()}

    def _locate(self, name: str) -> tuple[str, object]:
        """Return the path of the parameter that a tensor is loaded into, and its shard there."""
        mapper = getattr(self._model, "hf_to_vllm_mapper", None)
        path, shard = name, None
        if mapper is not None:
            mapped = mapper._map_name_with_shard(name)
            path, shard = (name, None) if mapped is None else mapped
        module, _, attribute = path.rpartition(".")
        if shard is None and module not in self._modules:
            parent, _, leaf = module.rpartition(".")
            for fused, leaves in getattr(self._model, "packed_modules_mapping", {}).items():
                if leaf in leaves and f"{parent}.{fused}" in self._modules:
                    return f"{parent}.{fused}.{attribute}", leaves.index(leaf)
        return path, shard

    def _parameter(self, module: Any, attribute: str, sources: list[tuple[str, object]]) -> None:
        with self._comparison.attempt([name for name, _ in sources]):
            if isinstance(module, LinearBase):
                split = [self._split(module, name, shard) for name, shard in sources]
                self._linear(module, attribute, [part for parts in split for part in parts])
            elif isinstance(module, VocabParallelEmbedding):
                self._vocabulary(module, attribute, sources[0][0])
            else:
                self._plain(getattr(module, attribute, None), sources)

    def _split(self, module: Any, name: str, shard: object) -> Iterator[_Part]:
        """Return where the tensor, or this rank's part of it, is among the layer's outputs."""
        kind, rank = type(module), getattr(module, "tp_rank", 0)
        rows = self._tensors[name].shape[0]
        if kind is QKVParallelLinear:
            place = QKV[shard] if isinstance(shard, int) else shard
            if place not in QKV:
                raise Unreadable("it is fused in the checkpoint already")
            heads = (module.num_heads, module.num_kv_heads, module.num_kv_heads)
            sizes = (module.head_size, module.head_size, module.v_head_size)
            widths = [count * size for count, size in zip(heads, sizes, strict=True)]
            at = QKV.index(place)
            first, width = sum(widths[:at]), widths[at]
            holder = rank if place == "q" else rank // module.num_kv_head_replicas
            yield _Part(name, (first, first + width), (holder * width, (holder + 1) * width))
        elif kind is MergedColumnParallelLinear:
            sizes, ranks = module.output_sizes, module.tp_size
            if shard is not None and not isinstance(shard, int):
                raise Unreadable(f"it is loaded as shard {shard!r}")
            for at in range(len(sizes)) if shard is None else (shard,):
                width, first = sizes[at] // ranks, sum(sizes[:at]) // ranks
                begin = (sum(sizes[:at]) if shard is None else 0) + rank * width
                yield _Part(name, (first, first + width), (begin, begin + width))
        elif shard is not None:
            raise Unreadable(f"it is loaded as shard {shard!r} of {kind.__name__}")
        elif kind is ColumnParallelLinear:
            width = rows // module.tp_size
            yield _Part(name, (0, width), (rank * width, (rank + 1) * width))
        elif kind is RowParallelLinear:
            width = module.input_size_per_partition
            yield _Part(name, (0, rows), (0, rows), (rank * width, (rank + 1) * width))
        elif isinstance(module, ReplicatedLinear):
            yield _Part(name, (0, rows), (0, rows))
        else:
            raise Unreadable(f"the split of a {kind.__name__} is not known")

    def _linear(self, module: Any, attribute: str, parts: list[_Part]) -> None:
        if type(module.quant_method) is not UnquantizedLinearMethod:
            raise Unreadable(f"quantised: {type(module.quant_method).__name__}")
        if attribute == "weight":
            self._matrix(module, parts)
        elif attribute == "bias" and module.bias is not None:
            zeros = torch.zeros(1, _inputs(module), dtype=_dtype(module), device=_device(module))
            held = module.quant_method.apply(module, zeros, module.bias)[0]
            for part in parts:
                source = self._tensors[part.name][slice(*part.source)]
                start = (part.source[0], 0)
                self._comparison.compare(part.name, held[slice(*part.rows)], source, start)
        else:
            raise Unreadable(f"{type(module).__name__} has no {attribute!r} to read back")

    def _matrix(self, module: Any, parts: list[_Part]) -> None:
        """Compare the weights of a layer, read as products of its kernel with identity blocks."""
        inputs = _inputs(module)
        outputs = max(part.rows[1] for part in parts)
        for part in parts:
            tensor, columns = self._tensors[part.name], part.columns or (0, inputs)
            if tensor.ndim != 2 or tensor.shape[1] < columns[1] or tensor.shape[0] < part.source[1]:
                raise Unreadable(f"its shape {list(tensor.shape)} does not fit the layer")
        step = max(1, min(inputs, BLOCK // max(inputs, outputs)))
        for begin in range(0, inputs, step):
            size = min(step, inputs - begin)
            block = torch.zeros(size, inputs, dtype=_dtype(module), device=_device(module))
            block[torch.arange(size), torch.arange(begin, begin + size)] = 1
            product = module.quant_method.apply(module, block, None)
            for part in parts:
                first = begin + (part.columns[0] if part.columns else 0)
                source = self._tensors[part.name][slice(*part.source), first : first + size]
                held = product[:, slice(*part.rows)].t()
                self._comparison.compare(part.name, held, source, (part.source[0], first))

    def _vocabulary(self, module: Any, attribute: str, name: str) -> None:
        """Compare an embedding in place, and a head through its kernel."""
        if type(module.quant_method) is not UnquantizedEmbeddingMethod:
            raise Unreadable(f"quantised: {type(module.quant_method).__name__}")
        if attribute != "weight":
            self._plain(getattr(module, attribute, None), [(name, None)])
            return
        indices = module.shard_indices
        source = (indices.org_vocab_start_index, indices.org_vocab_end_index)
        rows = (0, source[1] - source[0])
        if isinstance(module, ParallelLMHead):
            self._matrix(module, [_Part(name, rows, source)])
            return
        step = max(1, BLOCK // module.weight.shape[1])
        for begin in range(0, rows[1], step):
            held = module.weight[begin : min(begin + step, rows[1])]
            first = source[0] + begin
            expected = self._tensors[name][first : first + held.shape[0]]
            self._comparison.compare(name, held, expected, (first, 0))

    def _tied_head(self) -> None:
        """Compare the head of a model with tied embeddings, which may have a copy of its own."""
        for module in self._modules.values():
            if isinstance(module, ParallelLMHead):
                # The tensors are the embedding's, and the name in the report is the head's.
                self._tensors[HEAD] = self._tensors[EMBEDDING]
                self._parameter(module, "weight", [(HEAD, None)])

    def _plain(self, parameter: Any, sources: list[tuple[str, object]]) -> None:
        """Compare a parameter in place."""
        if len(sources) != 1:
            raise Unreadable("several tensors are loaded into one parameter")
        name = sources[0][0]
        tensor = self._tensors[name]
        if not isinstance(parameter, torch.Tensor):
            raise Unreadable("the module has no such parameter")
        if parameter.shape != tensor.shape:
            raise Unreadable(f"the held shape is {list(parameter.shape)}")
        self._comparison.compare(name, parameter, tensor)

    def _experts(self, layer: ExpertLayer) -> None:
        with self._comparison.attempt(layer.names):
            for name, held, expected, start in layer.pairs(self._tensors):
                self._comparison.compare(name, held, expected, start)
        self._comparison.unread |= layer.unread
        self._comparison.absent += layer.absent

    def _derived(self) -> None:
        """Report copies of weights that attention kernels keep beside their layer's own."""
        for path, module in self._modules.items():
            for copy in ("W_UV", "W_UK_T"):
                if isinstance(getattr(module, copy, None), torch.Tensor):
                    self._comparison.unread[f"{path}.{copy}"] = "derived from kv_b_proj"


def _inputs(module: Any) -> int:
    if isinstance(module, VocabParallelEmbedding):
        return int(module.embedding_dim)
    return int(getattr(module, "input_size_per_partition", module.input_size))


def _dtype(module: Any) -> Any:
    # On a CPU the parameter is empty once it is packed, but keeps its dtype.
    return module.weight.dtype


def _device(module: Any) -> Any:
    return module.weight.device
