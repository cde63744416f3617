"""The table of losses by name: `loss.kind` of a run, and `loss_fn` of a Tinker call."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.train.losses.cispo import cispo
from lockstep.train.losses.dapo import dapo
from lockstep.train.losses.distillation import forward_kl, jsd, reverse_kl
from lockstep.train.losses.dppo import dppo
from lockstep.train.losses.dr_grpo import dr_grpo
from lockstep.train.losses.dro import dro
from lockstep.train.losses.grpo import grpo
from lockstep.train.losses.gspo import gspo
from lockstep.train.losses.importance_sampling import importance_sampling
from lockstep.train.losses.ipo import ipo
from lockstep.train.losses.loss import Loss
from lockstep.train.losses.ppo import ppo
from lockstep.train.losses.reinforce_pp import reinforce_pp
from lockstep.train.losses.rloo import rloo
from lockstep.train.losses.sft import sft

LOSSES: Mapping[str, Loss] = {
    "dppo": Loss.of(dppo, trains_decoupled=False),
    "ipo": Loss.of(ipo, trains_decoupled=False),
    "grpo": Loss.of(grpo, baseline="group_std", aggregation="sequence"),
    "dr_grpo": Loss.of(dr_grpo, aggregation="constant"),
    "dapo": Loss.of(dapo, baseline="group_std", resamples=True, overlong=0.2),
    "rloo": Loss.of(rloo, baseline="leave_one_out", aggregation="constant"),
    "reinforce++": Loss.of(reinforce_pp, baseline="batch"),
    "gspo": Loss.of(gspo, baseline="group_std", aggregation="sequence"),
    "cispo": Loss.of(cispo, baseline="group_std"),
    "ppo": Loss.of(ppo),
    "importance_sampling": Loss.of(importance_sampling),
    "dro": Loss.of(dro, trains_decoupled=False),
    "sft": Loss.of(sft),
    "cross_entropy": Loss.of(sft),
    "distill": Loss.of(dppo, learns_from="teacher", trains_decoupled=False),
    "forward_kl": Loss.of(forward_kl, learns_from="distributions"),
    "reverse_kl": Loss.of(reverse_kl, learns_from="distributions"),
    "jsd": Loss.of(jsd, learns_from="distributions", shares=("beta",)),
}
