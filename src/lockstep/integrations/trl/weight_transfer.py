"""Weight updates of an AsyncGRPOTrainer: written, staged, proved and committed by the fleet."""

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

    `model` is the model that the trainer was created with. A copy of it on the CPU receives the
    trainer's tensors by name and computes the probe that workers must reproduce, so that a lost or
    misplaced tensor is found before it is served. With `exact` they must match bit for bit.
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
        """Connect and load the copy. Raises NotExact where this machine cannot be exact."""
        from transformers import AutoModelForCausalLM

        self._policy.open()
        self._copy: Any = AutoModelForCausalLM.from_pretrained(self._source, dtype=self._dtype)
        if self._exact:
            exactness.prepare(self._copy)
        remember(self._copy)

    def pause(self) -> None:
        """Do nothing: workers keep generating until the new weights are proved."""

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Publish these weights. Raises CheckpointError for tensors that do not fit the model, and
        what the fleet raises."""
        own = dict(self._copy.named_parameters())
        missing, unexpected = set(own), []
        with torch.no_grad():
            # Consume the iterator to its end: the other ranks take part in every step of it.
            for name, tensor in iterator:
                if name in own and own[name].shape == tensor.shape:
                    own[name].copy_(tensor)
                    missing.discard(name)
                else:
                    unexpected.append(f"{name} {tuple(tensor.shape)}")
        problems = [f"unexpected {name}" for name in unexpected[:3]]
        problems += [f"missing {name}" for name in sorted(missing)[:3]]
        if problems:
            raise CheckpointError(
                f"the trainer's weights are not those of {self._source}: {'; '.join(problems)}; "
                "pass the model that the trainer was created with"
            )
        self._policy.publish(self._save)

    def _save(self, directory: Path, version: str) -> None:
        save_checkpoint(self._copy, directory, version=version)

    def resume(self) -> None:
        """Do nothing; see `pause`."""

    def destroy(self) -> None:
        """Close the connections. TRL has stopped the rollout worker by then."""
        self._policy.close()
