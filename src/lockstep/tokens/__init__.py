"""Shared values: sampling options, completions, and training samples."""

from lockstep.tokens import errors
from lockstep.tokens.completion import (
    FINISHES,
    Completion,
    Finish,
    PromptLogprob,
    Ranked,
    VersionSpan,
    check_logprobs,
    merge_spans,
)
from lockstep.tokens.errors import LockstepError
from lockstep.tokens.experts import RoutedExperts
from lockstep.tokens.sample import Sample, TrainedSpan
from lockstep.tokens.sampling import LogprobMode, Sampling
from lockstep.tokens.shaping import ShapedSpan, Shaping
from lockstep.tokens.support import Support

__all__ = [
    "FINISHES",
    "Completion",
    "Finish",
    "LockstepError",
    "LogprobMode",
    "PromptLogprob",
    "Ranked",
    "RoutedExperts",
    "Sample",
    "Sampling",
    "ShapedSpan",
    "Shaping",
    "Support",
    "TrainedSpan",
    "VersionSpan",
    "check_logprobs",
    "errors",
    "merge_spans",
]
