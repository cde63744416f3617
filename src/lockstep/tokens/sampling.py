"""Sampling options of one generation, validated on construction."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Literal

from lockstep.tokens.errors import BadRequest
from lockstep.tokens.grammar import Grammar
from lockstep.tokens.shaping import Shaping

LogprobMode = Literal["raw", "processed"]
MAX_LOGPROBS = 100
MAX_N = 1024
MAX_STOPS = 64
# Beyond these, fp32 has no precision left: the distribution would be NaN, or not the one requested.
MIN_TEMPERATURE = 1e-4
MIN_TOP_P = 1e-6
MAX_BIAS = 100.0
MAX_PENALTY = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Options of one generation. Raises BadRequest that names a field with an invalid value.

    `logprobs` is the number of alternatives to report for each sampled token (its own logprob is
    always reported), `prompt_logprobs` the same for prompt tokens, or None for none. `stop` are
    strings that end the generation with the token that completes one; a `grammar` masks the tokens
    that do not match it. `logprob_mode` "raw" takes logprobs from the model's own distribution,
    "processed" from the one that was sampled from; None leaves the choice to the engine.
    Temperature 0 is greedy. `repetition_penalty` counts prompt and completion, the other two the
    completion only. Only the temperature applies to a prompt's processed logprobs, unless
    `score_start` is set: tokens from there on are scored as if sampled with all these options.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    allowed_token_ids: tuple[int, ...] | None = None
    logit_bias: Mapping[int, float] | None = None
    grammar: Grammar | None = None
    logprobs: int = 0
    prompt_logprobs: int | None = None
    score_start: int | None = None
    logprob_mode: LogprobMode | None = None

    def __post_init__(self) -> None:
        for field, default, makes_sense, expected in CHECKED:
            # Most options have their defaults, which are valid.
            if (value := getattr(self, field)) is not default and not makes_sense(value):
                raise BadRequest(f"{field} must be {expected}, got {value!r}", param=field)
        if self.grammar is not None and self.min_tokens:
            raise BadRequest(
                f"min_tokens is {self.min_tokens} beside a grammar, which alone decides where it "
                "may end: leave one of them out",
                param="min_tokens",
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise BadRequest(
                f"min_tokens must be at most max_tokens, got {self.min_tokens} and "
                f"{self.max_tokens}",
                param="min_tokens",
            )
        for token, bias in (self.logit_bias or {}).items():
            if not abs(bias) <= MAX_BIAS:
                raise BadRequest(
                    f"logit_bias must be between -{MAX_BIAS:g} and {MAX_BIAS:g}, got {bias!r} for "
                    f"token {token}",
                    param="logit_bias",
                )

    def fits(self, prompt_len: int, max_len: int) -> bool:
        """Return whether a context of `max_len` tokens has room for a prompt and its completion.

        A prompt whose logprobs are requested may fill it: the one token sampled after it is never
        computed further.
        """
        scores = self.prompt_logprobs is not None and self.max_tokens == 1
        return prompt_len < max_len or (scores and prompt_len == max_len)

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from a set that depends on the weights."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def records_support(self, requested: bool | None) -> bool:
        """Whether to record the set that each token is drawn from.

        `requested` true records it wherever options restrict it, and None only where it depends on
        the weights. Raw logprobs are not those of the sets, so that they have none.
        """
        if requested is False or self.logprob_mode == "raw":
            return False
        if self.truncates or not requested:
            return self.truncates
        shaping = self.shaping()
        return shaping is not None and shaping.restricts

    def shaping(self, eos_ids: tuple[int, ...] = ()) -> Shaping | None:
        """Return the options besides the temperature that shape the distribution, given end tokens.

        None if there are none, which is the usual case.
        """
        if _shaped(self) == UNSHAPED:
            return None
        ends = (*self.stop_token_ids, *(() if self.ignore_eos else eos_ids))
        shaping = Shaping(
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=dict(self.logit_bias) if self.logit_bias else None,
            allowed_token_ids=self.allowed_token_ids,
            min_tokens=self.min_tokens,
            grammar=self.grammar,
            end_ids=tuple(sorted(set(ends))) if self.min_tokens or self.grammar else (),
        )
        return None if shaping == Shaping() else shaping


CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (
        lambda value: value == 0 or MIN_TEMPERATURE <= value < math.inf,
        f"0 (greedy) or at least {MIN_TEMPERATURE}",
    ),
    "top_p": (lambda value: MIN_TOP_P <= value <= 1, f"between {MIN_TOP_P} and 1"),
    "top_k": (lambda value: value >= 0, ">= 0 (0 turns it off)"),
    "min_p": (lambda value: 0 <= value <= 1, "in [0, 1]"),
    "presence_penalty": (
        lambda value: abs(value) <= MAX_PENALTY,
        f"between -{MAX_PENALTY:g} and {MAX_PENALTY:g}",
    ),
    "frequency_penalty": (
        lambda value: abs(value) <= MAX_PENALTY,
        f"between -{MAX_PENALTY:g} and {MAX_PENALTY:g}",
    ),
    "repetition_penalty": (lambda value: 0 < value < math.inf, "a finite number above 0"),
    "seed": (lambda value: -(2**63) <= value < 2**63, "a 64-bit integer"),
    "max_tokens": (lambda value: value >= 1, "at least 1"),
    "min_tokens": (lambda value: value >= 0, ">= 0"),
    "n": (lambda value: 1 <= value <= MAX_N, f"between 1 and {MAX_N}"),
    "stop": (
        lambda value: len(value) <= MAX_STOPS and all(value),
        f"at most {MAX_STOPS} strings, none of them empty",
    ),
    "allowed_token_ids": (lambda value: len(value) > 0, "a list with at least one id"),
    "logprobs": (lambda value: 0 <= value <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}"),
    "prompt_logprobs": (lambda value: 0 <= value <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}"),
    "score_start": (lambda value: value >= 0, ">= 0"),
    "logprob_mode": (lambda value: value in ("raw", "processed"), "raw or processed"),
}
"""Valid values of each option: a predicate, and its wording for the error. NaN fails every
comparison.
"""
CHECKED = tuple(
    (field.name, field.default, *CHECKS[field.name])
    for field in fields(Sampling)
    if field.name in CHECKS
)
_shaped = attrgetter(
    "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "allowed_token_ids", "min_tokens", "grammar",
)  # fmt: skip
UNSHAPED = _shaped(Sampling())
