"""Repeats, compares and audits recorded runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.lazy_names import import_on_use

if TYPE_CHECKING:
    from lockstep.replay.findings import Replay, ReplayDifference
    from lockstep.replay.replayer import replay
else:
    # The command line imports this package; only replaying needs torch.
    __getattr__ = import_on_use(
        __name__,
        {
            "ReplayDifference": "findings",
            "Replay": "findings",
            "replay": "replayer",
        },
    )

__all__ = ["Replay", "ReplayDifference", "replay"]
