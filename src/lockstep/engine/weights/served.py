"""The weights and adapters that an engine serves, and the weights before the last commit."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from lockstep.checkpoint.delta.record import read_link
from lockstep.engine.config import ModelConfig
from lockstep.engine.model.lora import Adapter
from lockstep.engine.options import EngineOptions
from lockstep.engine.sequence import EngineRequest
from lockstep.engine.weights.apply_delta import applies_to, with_delta
from lockstep.engine.weights.weights import Layout, Weights
from lockstep.tokens.errors import (
    Busy,
    CheckpointError,
    Conflict,
    UnknownModel,
    VersionUnavailable,
)
from lockstep.tokens.versions import joined

log = logging.getLogger(__name__)
HISTORY = 4096
"""Number of past versions that `min_weight_version` of a request may name."""


class ServedWeights:
    """The weights and adapters of one engine. Any thread may load; only the engine's may change."""

    def __init__(self, directory: Path, config: ModelConfig, options: EngineOptions) -> None:
        self.config = config
        self.options = options
        self.dtype: torch.dtype = getattr(torch, options.dtype)
        self.layout = Layout(config)
        self.weights = self._load(directory, options.weight_version)
        self.previous: Weights | None = None
        self.history = [options.weight_version]
        # Replaced, never changed: the event loop iterates over it while the engine's thread loads.
        self.adapters: Mapping[str, Adapter] = {}
        # Captured CUDA graphs hold addresses, so new weights are copied into the old memory.
        self._in_place = options.device != "cpu"

    # Loading

    def load_weights(self, directory: Path, version: str) -> Weights:
        """Read a checkpoint next to the live one. Raises CheckpointError unless it fits."""
        if (directory / "config.json").exists():
            self._check_same(ModelConfig.read(directory), directory)
        live = self.weights
        if (link := read_link(directory)) is not None and applies_to(link, live):
            try:
                return with_delta(live, link, version)
            except CheckpointError as error:
                # The chain from the last full checkpoint does not depend on what is in memory.
                log.warning("applying a delta failed, reading its chain: %s", error.message)
        return self._load(directory, version)

    def load_adapter(
        self,
        name: str,
        path: Path,
        label: str | None = None,
        roots: Sequence[Path] | None = None,
    ) -> Adapter:
        """Read an adapter. Raises AdapterError unless it fits, Forbidden for a symlink out of
        `roots`."""
        return Adapter.load(
            name,
            path,
            self.config,
            max_rank=self.options.max_lora_rank,
            device=self.options.device,
            dtype=self.dtype,
            label=label,
            roots=roots,
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
        """Serve `weights` and keep the current set for one rollback."""
        # The graphs' memory then holds the new values, and the staged memory the old ones: the
        # previous set stays available for a rollback without a third copy.
        if self._in_place:
            self.weights.exchange_memory(weights)
        self.previous, self.weights = self.weights, weights
        self.history = [*self.history[-HISTORY:], weights.version]

    def rollback(self) -> None:
        """Serve the set before the last commit again. Raises Conflict when there is none."""
        if self.previous is None:
            raise Conflict("there is nothing to roll back to: no commit since the last rollback")
        if self._in_place:
            self.weights.exchange_memory(self.previous)
        self.weights, self.previous = self.previous, None
        self.history.pop()

    def add_adapter(self, adapter: Adapter) -> bool:
        """Serve an adapter; return whether it replaced one of the same name.

        Requests in flight under the replaced adapter finish under it. Raises Busy at the limit.
        """
        swapped = adapter.name in self.adapters
        if not swapped and len(self.adapters) >= self.options.max_adapters:
            raise Busy(
                f"{len(self.adapters)} adapters are loaded, which is the limit: unload one, or "
                "raise max_adapters"
            )
        self.adapters = {**self.adapters, adapter.name: adapter}
        return swapped

    def remove_adapter(self, name: str) -> None:
        """Stop serving an adapter. Raises UnknownModel when it is not loaded."""
        removed = self.adapter(name)
        self.adapters = {k: v for k, v in self.adapters.items() if v is not removed}

    def adapter(self, name: str) -> Adapter:
        """Return the adapter of that name.

        Raises UnknownModel: a request for an adapter is never served by the base model.
        """
        try:
            return self.adapters[name]
        except KeyError:
            raise UnknownModel(f"adapter {name!r} is not loaded", param="model") from None

    def version_of(self, adapter: Adapter | None) -> str:
        """Return the version label of a token sampled now: of the weights and the adapter."""
        if adapter is None:
            return self.weights.version
        return joined(self.weights.version, adapter.name, adapter.label)

    def check_served(self, request: EngineRequest) -> None:
        """Raise UnknownModel or VersionUnavailable unless the request can be served now."""
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
