"""Trainers of TRL whose model the ranks share out by FSDP2."""

from __future__ import annotations

import logging
from typing import Any

from lockstep.tokens.errors import BadRequest

log = logging.getLogger(__name__)


def check_sharding(trainer: Any, *, shard: bool) -> None:
    """Raise BadRequest for a trainer that cannot be sharded.

    Log a warning if FSDP was requested from accelerate, which ignores that on a CPU.
    """
    accelerator = trainer.accelerator
    if not shard:
        plugin = getattr(accelerator.state, "fsdp_plugin", None)
        if plugin is not None or getattr(trainer.args, "fsdp", None):
            log.warning(
                "accelerate ignores FSDP on a CPU and trains with DDP, so that every rank holds "
                "the whole model: leave FSDP out and call attach(trainer, shard=True)"
            )
        return
    if hasattr(trainer.model, "peft_config"):
        raise BadRequest("adapters are not sharded: attach without shard=True", param="shard")
    if accelerator.num_processes == 1:
        raise BadRequest(
            "shard is true, but this trainer has one process: start it with torchrun",
            param="shard",
        )


def shard_model(trainer: Any) -> None:
    """Share out the trainer's model among its ranks, before its optimizer is created."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = trainer.model
    mesh = init_device_mesh(trainer.accelerator.device.type, (trainer.accelerator.num_processes,))
    blocks = set(model._no_split_modules or ())
    for module in list(model.modules()):
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model._is_accelerate_prepared = True  # accelerate would wrap it in DDP
