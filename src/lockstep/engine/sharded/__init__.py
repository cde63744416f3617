"""Checkpoints of trainers with many ranks: every rank writes its own slices of the weights.

    path = sharded.save_checkpoint(model, "/checkpoints/step-7", version="step-7")

Every rank calls the function, with the same arguments. No rank holds the whole model.
"""

from __future__ import annotations

from lockstep.engine.sharded.parts import Shard
from lockstep.engine.sharded.save import save_checkpoint, save_tensors

__all__ = ["Shard", "save_checkpoint", "save_tensors"]
