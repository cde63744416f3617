"""AsyncGRPOTrainer's weights to a fleet: written, staged, proved and committed as one update."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.engine import exact as exactness
from lockstep.engine.probe import remember, save_checkpoint
from lockstep.integrations.trl.served_policy import ServedPolicy
from lockstep.tokens.errors import CheckpointError


class LockstepWeightTransfer:
    """The `weight_transfer` of an AsyncGRPOTrainer.

    `model` is what the trainer was made from. A copy of it on the CPU takes the trainer's tensors
    by name and computes the probe that workers must reproduce: a tensor that got lost, or went to
    the wrong place, is found before it is served. With `exact` they must do so bit for bit.
    """

    def __init__(
        self,
        policy: ServedPolicy,
        model: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        exact: bool = False,
    ) -> None:
        self._policy = policy
        self._source = model
        self._dtype = dtype
        self._exact = exact

    def init_weight_transfer(self) -> None:
        """Connects and loads the copy. Raises NotExact where this machine cannot be exact."""
        from transformers import AutoModelForCausalLM

        self._policy.open()
        self._copy: Any = AutoModelForCausalLM.from_pretrained(self._source, dtype=self._dtype)
        if self._exact:
            exactness.prepare(self._copy)
        remember(self._copy)

    def pause(self) -> None:
        """Nothing: workers go on generating until the new weights are proved."""

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Serves these weights, proved. Raises CheckpointError for tensors that do not fit the
        model, and what the fleet raises."""
        own = dict(self._copy.named_parameters())
        missing, strange = set(own), []
        with torch.no_grad():
            # To its end whatever comes: the other ranks take part in every step of it.
            for name, tensor in iterator:
                if name in own and own[name].shape == tensor.shape:
                    own[name].copy_(tensor)
                    missing.discard(name)
                else:
                    strange.append(f"{name} {tuple(tensor.shape)}")
        problems = [f"it does not have {name}" for name in strange[:3]]
        problems += [f"{name} did not come" for name in sorted(missing)[:3]]
        if problems:
            raise CheckpointError(
                f"the trainer's weights are not those of {self._source}: {'; '.join(problems)}; "
                "give the model that the trainer was made from"
            )
        self._policy.publish(self._save)

    def _save(self, directory: Path, version: str) -> None:
        save_checkpoint(self._copy, directory, version=version)

    def resume(self) -> None:
        """Nothing: see `pause`."""

    def destroy(self) -> None:
        """Ends the connections; the worker has stopped by then."""
        self._policy.close()
