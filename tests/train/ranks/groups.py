"""Ranks that get lost, and what the others say about it."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

from lockstep.tokens.errors import LockstepError
from lockstep.train.config import TrainConfig
from lockstep.train.ranks import rank_group
from lockstep.train.ranks.follower import follow
from lockstep.train.ranks.leader import END, LeadingLearner, shared_plan
from lockstep.train.ranks.rank_group import RankGroup


def joined() -> RankGroup:
    return RankGroup(dist.distributed_c10d._get_default_store())


def refuse_adapters(rank: int, path: Path) -> str:
    """Rank 0 trains an adapter, which no rank accepts, and then ends the run."""
    group = joined()
    config = TrainConfig.of({"run_dir": str(path), "learner": {"lora_rank": 4}})
    try:
        if rank:
            follow(group)
        else:
            shared_plan(config, group)
            LeadingLearner.open(config, exact=True, weights=None, ranks=group)
    except LockstepError as error:
        return error.message
    return ""


def fail(rank: int, how: str) -> str:
    """Rank 1 fails or ends while rank 0 announces something."""
    rank_group.SEARCH_SECONDS = 2.5
    group = joined()
    if rank == 1:
        with group.working("failing"):
            if how == "killed":
                os._exit(1)
            raise ValueError("no memory left")
    try:
        group.announce(END)
        with group.working("learning step 1"):
            dist.barrier(group.group)
    except LockstepError as error:
        return error.message
    return ""


def follow_nobody(rank: int) -> str:
    """Rank 0 ends without a word while rank 1 waits for a command."""
    rank_group.SILENT_SECONDS = 2.0
    group = joined()
    if rank == 0:
        os._exit(1)
    try:
        follow(group)
    except LockstepError as error:
        return error.message
    return ""
