"""The choices at a prefix break, an error or a new branch, and the default of each caller."""

from __future__ import annotations

from typing import Literal, get_args

from lockstep.tokens.errors import BadRequest

Breaks = Literal["strict", "fork"]
BREAKS: tuple[Breaks, ...] = get_args(Breaks)
CLIENT_BREAKS: Breaks = "strict"
"""Of `policy.chat`: who writes the conversation can mend what broke it, if told at once."""
GATEWAY_BREAKS: Breaks = "fork"
"""Of a session at a gateway: an agent that nobody will rewrite goes on, and each branch is kept."""
TRAINER_BREAKS: Breaks = "fork"
"""Of rollouts: one broken conversation must not end a run; its branches are learnt from."""


def check_breaks(value: str, param: str = "breaks") -> Breaks:
    """The value. Raises BadRequest that names `param` unless it is "strict" or "fork"."""
    for known in BREAKS:
        if value == known:
            return known
    raise BadRequest(f"{param} is {value!r}: expected {' or '.join(BREAKS)}", param=param.lower())
