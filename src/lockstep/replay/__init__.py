"""Repeats, compares and audits recorded runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.lazy_names import import_on_use

if TYPE_CHECKING:
    from lockstep.replay.auditing import Audit, audit
    from lockstep.replay.bisection import Bisection, bisect
    from lockstep.replay.findings import Replay, ReplayDifference
    from lockstep.replay.packing import Pack, write_pack
    from lockstep.replay.replayer import replay
else:
    # The command line imports this package; only replaying needs torch.
    __getattr__ = import_on_use(
        __name__,
        {
            "Audit": "auditing",
            "Bisection": "bisection",
            "ReplayDifference": "findings",
            "Pack": "packing",
            "Replay": "findings",
            "audit": "auditing",
            "bisect": "bisection",
            "replay": "replayer",
            "write_pack": "packing",
        },
    )

__all__ = [
    "Audit",
    "Bisection",
    "Pack",
    "Replay",
    "ReplayDifference",
    "audit",
    "bisect",
    "replay",
    "write_pack",
]
