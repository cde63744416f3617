"""The weight transfer backend "lockstep" of vLLM: the implementation of vLLM's own weight routes.

The model is unchanged until the last step, finish_weight_update, which swaps all of it. So an
update that fails, or is never finished, leaves a server that works as before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader import get_model_loader

from lockstep.backends.vllm.extension.adapter_read_back import AdapterNames
from lockstep.backends.vllm.extension.load import load
from lockstep.backends.vllm.extension.rank_weights import RankWeights
from lockstep.backends.vllm.extension.read_back import read_back
from lockstep.backends.vllm.extension.source import Sources
from lockstep.checkpoint.stores.url import AllowedRoots
from lockstep.protocol.control.generations import Generations
from lockstep.protocol.control.read_back import ReadBack
from lockstep.protocol.control.worker import Stage
from lockstep.tokens.errors import BadRequest, UnsupportedField

NAME = "lockstep"


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """`roots`: the only directories and prefixes of stores to read weights from; empty: any."""

    roots: list[str] = field(default_factory=list)


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The fields of protocol.control.worker.Stage.

    The updates of one session together must be complete, unless one of them is `partial`.
    """

    model_path: str | None = None
    shared_name: str | None = None
    group_name: str | None = None
    tensors: list[dict[str, Any]] = field(default_factory=list)
    partial: bool = False
    weight_version: str | None = None

    @property
    def stage(self) -> Stage:
        return stage_of(asdict(self))


class LockstepTransfer(WeightTransferEngine):  # type: ignore[misc]
    """The weights of this rank in memory: served, staged, and the previous ones."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self.sources = Sources(vllm_config.parallel_config.rank)
        self.generations = Generations()
        self._partial = False
        text = vllm_config.model_config.hf_config.get_text_config()
        self._tied = bool(getattr(text, "tie_word_embeddings", False))
        self.adapter_names = AdapterNames()
        self.weights = RankWeights(
            _at_start(vllm_config, model),
            self._load,
            self.sources.read,
            tied=self._tied,
        )

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.sources.roots = AllowedRoots.of(init_info.roots)

    def start_weight_update(self) -> None:
        self.weights.begin()
        self._partial = False

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self.weights.add(update_info.stage)
        self._partial |= update_info.partial

    def finish_weight_update(self) -> None:
        self.weights.finish(partial=self._partial)

    def read_back(self) -> ReadBack:
        """Compare the weights that the model computes with to the live tensors."""
        with set_current_vllm_config(self.vllm_config):
            return read_back(self.model, self.weights.live_tensors, tied=self._tied)

    def shutdown(self) -> None:
        self.sources.leave()

    def _load(self, new: Mapping[str, Any], old: Mapping[str, Any]) -> None:
        with set_current_vllm_config(self.vllm_config):
            load(self.model, self.model_config, new, old)


def stage_of(fields: Mapping[str, Any]) -> Stage:
    """Return the typed request. Raises BadRequest for an unknown field or a wrong type."""
    try:
        return msgspec.convert(dict(fields), Stage)
    except msgspec.ValidationError as error:
        raise BadRequest(f"the description of the weights to stage is invalid: {error}") from None


def _at_start(vllm_config: Any, model: Any) -> dict[str, Any]:
    """Return the tensors that the model was started with. They are mapped from their files, not
    copied."""
    loader = get_model_loader(vllm_config.load_config)
    if not hasattr(loader, "get_all_weights"):
        raise UnsupportedField(
            f"--load-format is {vllm_config.load_config.load_format!r}: the weight transfer "
            f"backend {NAME!r} needs one that reads a checkpoint (auto, safetensors)",
            param="load_format",
        )
    return dict(loader.get_all_weights(vllm_config.model_config, model))
