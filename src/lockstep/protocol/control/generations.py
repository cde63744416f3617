"""Fencing: a worker obeys the latest generation of its gateway and rejects earlier ones."""

from __future__ import annotations

from lockstep.tokens.errors import Superseded


class Generations:
    """The highest gateway generation a worker has obeyed; 0 before any.

    A generation is a number and the gateway that holds it. The number alone does not tell two
    gateways apart: each takes one above those it knows, and without a common store two of them can
    take the same one.
    """

    def __init__(self) -> None:
        self.highest = 0
        self.gateway: str | None = None
        """Identity of the gateway that `highest` belongs to; None for one that sent none."""

    def check(self, generation: int | None, gateway: str | None = None) -> None:
        """Raise Superseded for a generation below the highest, and for the highest itself from
        another gateway than the one obeyed. A command without a number is never rejected."""
        if generation is None:
            return
        of_another = generation == self.highest > 0 and gateway != self.gateway
        if generation < self.highest or of_another:
            raise Superseded(
                f"this comes from generation {generation} of a gateway ({gateway}), and generation "
                f"{self.highest} of {self.gateway} was obeyed since: another gateway controls this "
                "worker",
                param="generation",
            )
        self.highest, self.gateway = generation, gateway
