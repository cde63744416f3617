"""TRL's trainers on a Lockstep fleet: rollouts from the fleet, weight updates to it."""

from lockstep.integrations.trl.cpu import enable_cpu
from lockstep.integrations.trl.generation import LockstepGeneration
from lockstep.integrations.trl.rollout_worker import LockstepRolloutWorker
from lockstep.integrations.trl.served_policy import ServedPolicy
from lockstep.integrations.trl.weight_transfer import LockstepWeightTransfer

__all__ = [
    "LockstepGeneration",
    "LockstepRolloutWorker",
    "LockstepWeightTransfer",
    "ServedPolicy",
    "enable_cpu",
]
