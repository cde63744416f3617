"""The table of losses by name: `loss.kind` of a run, and `loss_fn` of a Tinker call."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.train.losses.cispo import cispo
from lockstep.train.losses.cross_entropy import cross_entropy
from lockstep.train.losses.dro import dro
from lockstep.train.losses.grpo import grpo
from lockstep.train.losses.gspo import gspo
from lockstep.train.losses.importance_sampling import importance_sampling
from lockstep.train.losses.loss import Loss
from lockstep.train.losses.ppo import ppo

LOSSES: Mapping[str, Loss] = {
    "grpo": Loss.of(grpo),
    "distill": Loss.of(grpo, learns_from="teacher"),
    "cross_entropy": Loss.of(cross_entropy),
    "importance_sampling": Loss.of(importance_sampling),
    "ppo": Loss.of(ppo),
    "cispo": Loss.of(cispo),
    "dro": Loss.of(dro),
    "gspo": Loss.of(gspo),
}
