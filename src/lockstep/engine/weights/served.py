"""The weights and adapters that an engine serves now, and the weights before the last commit."""

from __future__ import annotations

from pathlib import Path

import torch

from lockstep.engine.config import EngineOptions, ModelConfig
from lockstep.engine.model.lora import Adapter
from lockstep.engine.sequence import EngineRequest
from lockstep.engine.weights.weights import Layout, Weights
from lockstep.tokens.errors import (
    Busy,
    CheckpointError,
    Conflict,
    UnknownModel,
    VersionUnavailable,
)
from lockstep.tokens.versions import joined

KEPT_VERSIONS = 4096
"""How many versions back `min_weight_version` of a request is still known."""


class ServedWeights:
    """Weights and adapters of one engine. Loading is safe in any thread; changes are not."""

    def __init__(self, directory: Path, config: ModelConfig, options: EngineOptions) -> None:
        self.config = config
        self.options = options
        self.dtype: torch.dtype = getattr(torch, options.dtype)
        self.layout = Layout(config)
        self.weights = self._load(directory, options.weight_version)
        self.previous: Weights | None = None
        self.history = [options.weight_version]
        self.adapters: dict[str, Adapter] = {}
        # Captured graphs hold addresses: what they are to compute with must come to lie there.
        self._in_place = options.device != "cpu"

    # Loading

    def load_weights(self, directory: Path, version: str) -> Weights:
        """Reads a checkpoint beside the live one. Raises CheckpointError unless it fits."""
        if (directory / "config.json").exists():
            self._check_same(ModelConfig.read(directory), directory)
        return self._load(directory, version)

    def load_adapter(self, name: str, path: Path, label: str | None = None) -> Adapter:
        """Reads an adapter. Raises AdapterError unless it fits."""
        return Adapter.load(
            name,
            path,
            self.config,
            max_rank=self.options.max_lora_rank,
            device=self.options.device,
            dtype=self.dtype,
            label=label,
        )

    def _load(self, directory: Path, version: str) -> Weights:
        return Weights.load(
            directory, self.layout, version, device=self.options.device, dtype=self.dtype
        )

    def _check_same(self, config: ModelConfig, directory: Path) -> None:
        for name in ModelConfig.__dataclass_fields__:
            here, there = getattr(self.config, name), getattr(config, name)
            if here != there and name not in ("eos_ids", "max_position"):
                raise CheckpointError(
                    f"{directory / 'config.json'} has {name} {there!r}, the served model {here!r}"
                )

    # Serving

    def commit(self, weights: Weights) -> None:
        """Serves `weights`; the old set is kept for one rollback."""
        if self._in_place:
            self.weights.exchange_places(weights)
        self.previous, self.weights = self.weights, weights
        self.history = [*self.history[-KEPT_VERSIONS:], weights.version]

    def rollback(self) -> None:
        """Serves the set before the last commit again. Raises Conflict when there is none."""
        if self.previous is None:
            raise Conflict("there is nothing to roll back to: no commit since the last rollback")
        if self._in_place:
            self.weights.exchange_places(self.previous)
        self.weights, self.previous = self.previous, None
        self.history.pop()

    def add_adapter(self, adapter: Adapter) -> bool:
        """Serves an adapter, instead of one of the same name if there is; returns whether.

        Requests in flight under the old one end under it.
        """
        swapped = adapter.name in self.adapters
        if not swapped and len(self.adapters) >= self.options.max_adapters:
            raise Busy(
                f"{len(self.adapters)} adapters are loaded, which is the limit: unload one, or "
                "raise max_adapters"
            )
        self.adapters[adapter.name] = adapter
        return swapped

    def remove_adapter(self, name: str) -> None:
        """Stops serving an adapter. Raises UnknownModel when it is not loaded."""
        del self.adapters[self.adapter(name).name]

    def adapter(self, name: str) -> Adapter:
        """The adapter of that name. Raises UnknownModel: the base model never stands in for one."""
        try:
            return self.adapters[name]
        except KeyError:
            raise UnknownModel(f"adapter {name!r} is not loaded", param="model") from None

    def version_of(self, adapter: Adapter | None) -> str:
        """The label of all that a token is sampled under: weights, and adapter if there is one."""
        if adapter is None:
            return self.weights.version
        return joined(self.weights.version, adapter.name, adapter.label)

    def check_served(self, request: EngineRequest) -> None:
        """Raises UnknownModel or VersionUnavailable unless this request's demands are met now."""
        if request.adapter is not None:
            self.adapter(request.adapter)
        served = self.weights.version
        if request.weight_version not in (None, served):
            raise VersionUnavailable(
                f"version {request.weight_version!r} was demanded, but {served!r} is served",
                param="weight_version",
            )
        floor = request.min_weight_version
        if floor is not None and floor not in self.history:
            raise VersionUnavailable(
                f"version {floor!r} or later was demanded, but it has not been committed here; "
                f"{served!r} is served",
                param="min_weight_version",
            )
