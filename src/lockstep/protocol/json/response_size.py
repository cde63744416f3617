"""Whether a response is so large that writing it would hold the event loop."""

from __future__ import annotations

from collections.abc import Iterable

from lockstep.tokens import Completion

LARGE_ENTRIES = 4096
"""Tokens with their alternatives from which on writing them takes milliseconds."""


def is_large(completions: Iterable[Completion], alternatives: int) -> bool:
    """Whether the completions have that many tokens, each with so many alternatives."""
    tokens = sum(
        len(completion.token_ids) + len(completion.prompt_logprobs or ())
        for completion in completions
    )
    return tokens * (1 + alternatives) > LARGE_ENTRIES
