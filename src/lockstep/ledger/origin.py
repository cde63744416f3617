"""Facts that a harness sends about itself with a request, from which lineage is derived."""

from __future__ import annotations

from typing import Literal

import msgspec

Side = Literal["", "compaction", "memory", "other"]


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """Origin of a request according to its headers and wording; empty where they do not tell.

    `agent` is the id of the harness's agent, thread or session, `parent` that of the agent that
    started it, `forked_from` that of the agent whose history it copied, `window` the context window
    that a compaction changes. `side` marks a call outside the conversation, and `side_evidence`
    says how that was determined. `retries` is the client's own count.
    """

    harness: str = ""
    agent: str = ""
    parent: str = ""
    forked_from: str = ""
    window: str = ""
    side: Side = ""
    side_evidence: str = ""
    retries: int = 0


NOWHERE = Origin()
"""Origin of a turn without any information."""
