"""All hypotheses, cheapest first."""

from __future__ import annotations

from lockstep.explain.hypotheses.definition import DEFINITION
from lockstep.explain.hypotheses.hypothesis import Candidate, Hypothesis, Trial
from lockstep.explain.hypotheses.inputs import INPUTS
from lockstep.explain.hypotheses.readings import READINGS
from lockstep.explain.hypotheses.weights import HELD_WEIGHTS

__all__ = ["HYPOTHESES", "Candidate", "Hypothesis", "Trial"]

HYPOTHESES: tuple[Hypothesis, ...] = tuple(
    sorted((*READINGS, *HELD_WEIGHTS, *INPUTS, *DEFINITION), key=lambda hypothesis: hypothesis.cost)
)
