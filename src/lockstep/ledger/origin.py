"""What a harness says about itself with a request: the facts that lineage is found from."""

from __future__ import annotations

from typing import Literal

import msgspec

Side = Literal["", "compaction", "memory", "other"]


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """Who made a request, as its headers and wording say; empty where they do not.

    `agent` is the id of the agent, thread or session of the harness, `parent` that of the agent
    that started it, `forked_from` that of which its history is a copy, `window` the context window
    that a compaction changes. `side` marks a call that is no turn of the conversation, and
    `side_evidence` is how that is known. `retries` is what the client itself counted.
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
"""The origin of a turn about which nothing was said."""
