"""Which of TRL's trainers can sample from a fleet through a generation object."""

from __future__ import annotations

from typing import Any

from lockstep.tokens.errors import BadRequest

RECOMPUTES = "RLOOTrainer"
SUPPORTED = ("GRPOTrainer", RECOMPUTES)
"""The trainers, with their subclasses, that sample with a generation object alone."""


def recomputes_logprobs(trainer: Any) -> bool:
    """Whether this trainer drops the sampler's logprobs and computes them again."""
    return _is(trainer, RECOMPUTES)


def check_supported(trainer: Any) -> None:
    """Raise BadRequest for a trainer of another kind, or with sharded weights."""
    if not _is(trainer, *SUPPORTED):
        raise BadRequest(
            f"{type(trainer).__name__} cannot sample from Lockstep: attach supports "
            f"{' and '.join(SUPPORTED)}, and AsyncGRPOTrainer takes LockstepRolloutWorker and "
            "LockstepWeightTransfer",
            param="trainer",
        )
    kind = str(trainer.accelerator.distributed_type).rpartition(".")[2]
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise BadRequest(
            f"the trainer is distributed by {kind}, which shares out the model after attach: start "
            "it with torchrun alone and call attach(trainer, shard=True), which uses FSDP2",
            param="trainer",
        )


def _is(trainer: Any, *names: str) -> bool:
    return any(base.__name__ in names for base in type(trainer).__mro__)
