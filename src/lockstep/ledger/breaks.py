"""Policies at a prefix break, and the default of each caller, defined only here.

"strict" raises PrefixBreak and leaves the conversation unchanged; "fork" continues in a new branch
with its own sample. Both record the break with its cause.
"""

from __future__ import annotations

from typing import Literal, get_args

from lockstep.tokens.errors import BadRequest

Breaks = Literal["strict", "fork"]
BREAKS: tuple[Breaks, ...] = get_args(Breaks)
CLIENT_BREAKS: Breaks = "strict"
"""Default of `policy.chat`: the caller wrote the conversation and can fix it at once."""
GATEWAY_BREAKS: Breaks = "fork"
"""Default of gateway sessions: an agent that will not be rewritten must keep running."""
TRAINER_BREAKS: Breaks = "fork"
"""Default of a trainer's rollouts: one broken conversation must not end a run."""


def check_breaks(value: str, param: str = "breaks") -> Breaks:
    """Return the value. Raises BadRequest that names `param` unless it is "strict" or "fork"."""
    for policy in BREAKS:
        if value == policy:
            return policy
    raise BadRequest(f"{param} is {value!r}: expected {' or '.join(BREAKS)}", param=param.lower())
