"""Attaches a fleet to trainers that cannot sample from one; prints what each attempt raised."""

import json
import os

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from trl import DPOTrainer, SFTTrainer
from trl.experimental.async_grpo import AsyncGRPOTrainer
from trl.experimental.gkd import GKDTrainer
from trl.experimental.online_dpo import OnlineDPOTrainer

from lockstep.integrations.trl import LockstepGeneration

refused = {}
for kind in (SFTTrainer, DPOTrainer, OnlineDPOTrainer, GKDTrainer, AsyncGRPOTrainer):
    trainer = object.__new__(kind)  # attach must refuse it before it reads anything of it
    for exact in (None, False):
        try:
            LockstepGeneration().attach(trainer, exact=exact)
        except Exception as error:
            refused[kind.__name__] = f"{type(error).__name__}: {error}"
print(json.dumps(refused))
