"""`lockstep train` on many ranks: starting them, and what each of them does."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.tokens.errors import BadRequest

if TYPE_CHECKING:
    from lockstep.train.ranks.rank_group import RankGroup


@dataclass(frozen=True, slots=True)
class RankPlace:
    """This process among the ranks that torchrun or `--ranks` started."""

    rank: int
    count: int

    @classmethod
    def read(cls) -> RankPlace | None:
        """Return the place that the environment describes, if it is one of several."""
        try:
            rank, count = (int(os.environ.get(name, "")) for name in ("RANK", "WORLD_SIZE"))
        except ValueError:
            return None
        return cls(rank, count) if count > 1 else None

    def check(self, ranks: int | None) -> None:
        """Raise BadRequest for another number of ranks than was started."""
        if ranks not in (None, self.count):
            raise BadRequest(
                f"--ranks is {ranks}, but torchrun started {self.count} ranks: leave --ranks out",
                param="--ranks",
            )

    def follow(self) -> None:
        """Do what rank 0 announces until the run ends."""
        from lockstep.train.ranks.follower import follow
        from lockstep.train.ranks.rank_group import RankGroup

        with RankGroup.join() as group:
            follow(group)

    @contextmanager
    def lead(self) -> Iterator[RankGroup]:
        """Lead the other ranks in the block. They end with it."""
        from lockstep.train.ranks.leader import END
        from lockstep.train.ranks.rank_group import RankGroup

        with RankGroup.join() as group:
            yield group
            # After an error they are ended by what started them: they may be inside an operation.
            group.announce(END)


def start_ranks(count: int, resume: str, run_dir: str) -> int:
    """Run this command on `count` ranks; return its exit code. `resume` is the sentence that says
    how to continue the run.
    """
    from lockstep.train.ranks.launch import run_ranks

    outcome = run_ranks(count, sys.argv[1:])
    if outcome.lost is not None:
        sys.stderr.write(f"{outcome.lost}\n{resume} in {run_dir}, if there is one yet.\n")
    return outcome.code


def resume_hint(config: Path, ranks: int) -> str:
    """Return the sentence that says how to continue a run."""
    own = f" --ranks {ranks}" if ranks > 1 else ""
    return f"`lockstep train {config}{own} --resume` continues from the last checkpoint"
