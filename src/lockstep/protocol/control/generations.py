"""Fencing: a worker obeys the latest generation of its gateway and rejects earlier ones."""

from __future__ import annotations

from lockstep.tokens.errors import Superseded


class Generations:
    """The highest gateway generation a worker has obeyed; 0 before any."""

    def __init__(self) -> None:
        self.highest = 0

    def check(self, generation: int | None) -> None:
        """Raise Superseded for a generation below the highest; None is never rejected."""
        if generation is None:
            return
        if generation < self.highest:
            raise Superseded(
                f"this comes from generation {generation} of a gateway, and generation "
                f"{self.highest} was obeyed since: another gateway controls this worker",
                param="generation",
            )
        self.highest = generation
