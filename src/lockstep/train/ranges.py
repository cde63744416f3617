"""Ranges of the numbers in a training configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The values that a number of the configuration may have, as an annotation of its field.

    Infinity and NaN are never allowed. The numbers of a list must all be in the range.
    """

    least: float | None = None
    above: float | None = None
    below: float | None = None
    most: float | None = None

    def __contains__(self, value: object) -> bool:
        if isinstance(value, tuple | list):
            return all(item in self for item in value)
        return (
            (isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)))
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
            and (self.most is None or value <= self.most)
        )

    def __str__(self) -> str:
        parts = (
            None if self.least is None else f"{self.least:g} or more",
            None if self.above is None else f"more than {self.above:g}",
            None if self.below is None else f"less than {self.below:g}",
            None if self.most is None else f"at most {self.most:g}",
        )
        return " and ".join(part for part in parts if part)
