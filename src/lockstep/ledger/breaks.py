"""What happens at a prefix break, and the default of each caller; nowhere else is one written.

"strict" raises PrefixBreak and leaves the conversation as it was; "fork" goes on in a new branch,
whose turns are a sample of their own. A break is recorded with its cause either way.
"""

from __future__ import annotations

from typing import Literal, get_args

from lockstep.tokens.errors import BadRequest

Breaks = Literal["strict", "fork"]
BREAKS: tuple[Breaks, ...] = get_args(Breaks)
CLIENT_BREAKS: Breaks = "strict"
"""`policy.chat`: the caller wrote the conversation and can mend it, if told at once."""
GATEWAY_BREAKS: Breaks = "fork"
"""Sessions of a gateway: an agent that nobody will rewrite must not stop; no branch is lost."""
TRAINER_BREAKS: Breaks = "fork"
"""Rollouts of a trainer: one broken conversation must not end a run; every branch is trained."""


def check_breaks(value: str, param: str = "breaks") -> Breaks:
    """The value. Raises BadRequest that names `param` unless it is "strict" or "fork"."""
    for known in BREAKS:
        if value == known:
            return known
    raise BadRequest(f"{param} is {value!r}: expected {' or '.join(BREAKS)}", param=param.lower())
