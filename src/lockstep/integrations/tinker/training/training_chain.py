"""The chain of one training client: what its calls brought, and what its steps left behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy.typing as npt

from lockstep.chain.records import canonical, sha256
from lockstep.integrations.tinker.protocol.json_bodies import AdamParams
from lockstep.integrations.tinker.protocol.protobuf_messages import ForwardBackwardRequest
from lockstep.integrations.tinker.training.lora_tensors import LoraSettings
from lockstep.train.records.chain_recorder import model_files
from lockstep.train.records.partial_chain import PartialChain
from lockstep.train.records.step_contents import digest_arrays
from lockstep.train.records.tensor_digests import Digests


class TrainingChain:
    """Records the steps of one model. Used from the training thread.

    The client keeps tasks, rewards and seeds to itself: its records lack them.
    """

    def __init__(self, directory: Path, base: Path, settings: LoraSettings) -> None:
        self._chain = PartialChain(directory, "tinker")
        self._calls: list[dict[str, Any]] = []
        self._loss = 0.0
        self._steps = 0
        self._chain.start(asdict(settings), _base_files(base))

    def call(
        self, request: ForwardBackwardRequest, logprobs: Sequence[npt.NDArray[Any]], loss: float
    ) -> None:
        """Note a call whose gradients were added."""
        names = sorted({name for datum in request.data for name in datum.inputs})
        self._loss += loss
        self._calls.append(
            {
                "loss_fn": request.loss_fn,
                "config": dict(request.config),
                "data": len(request.data),
                "tokens": digest_arrays((datum.tokens for datum in request.data), "int64"),
                "inputs": {
                    name: sha256(
                        b"\0".join(
                            datum.inputs[name].data if name in datum.inputs else b""
                            for datum in request.data
                        )
                    )
                    for name in names
                },
                "logprobs": digest_arrays(logprobs, "float32"),
            }
        )

    def step(self, params: AdamParams, grad_norm: float, digests: Digests) -> None:
        """Record an optimizer step over the calls since the last one."""
        calls, loss = self._calls, self._loss
        self.dropped()
        self._steps += 1
        metrics = {"grad_norm": grad_norm, "loss:sum": loss, **msgspec.structs.asdict(params)}
        order = sha256(canonical([call["tokens"] for call in calls]))
        self._chain.step(
            self._steps,
            digests,
            batch={"order": order, "calls": calls},
            learning={"metrics": metrics},
        )

    def dropped(self) -> None:
        """Forget the calls since the last step, whose gradients were cleared."""
        self._calls, self._loss = [], 0.0

    def loaded(self, directory: Path) -> None:
        """Record that a saved state replaced the weights."""
        self.dropped()
        self._chain.note("load", self._steps, files=model_files(str(directory)))


@lru_cache(maxsize=8)
def _base_files(base: Path) -> Mapping[str, str]:
    return model_files(str(base))
