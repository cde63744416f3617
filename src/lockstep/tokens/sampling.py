"""How to sample: the options of one generation, checked when they are made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lockstep.tokens.errors import BadRequest

LogprobMode = Literal["raw", "processed"]
MAX_LOGPROBS = 20
MAX_N = 1024
MIN_TEMPERATURE = 1e-4
MIN_TOP_P = 1e-6
MAX_BIAS = 100.0
"""Beyond these, fp32 has no room left: the distribution would be NaN, or not the one asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Options of one generation. Raises BadRequest that names a field whose value makes no sense.

    `logprobs` is the number of alternatives to report beside each sampled token (its own logprob
    always comes); `prompt_logprobs` the same for prompt tokens, or None for not at all.
    `logprob_mode` "raw" takes logprobs from the model's untouched distribution, "processed" from
    the one that was sampled from; None leaves it to the engine. Temperature 0 is greedy.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    allowed_token_ids: tuple[int, ...] | None = None
    logit_bias: Mapping[int, float] | None = None
    logprobs: int = 0
    prompt_logprobs: int | None = None
    logprob_mode: LogprobMode | None = None

    def __post_init__(self) -> None:
        def require(ok: bool, field: str, expected: str) -> None:
            if not ok:
                value = getattr(self, field)
                raise BadRequest(f"{field} must be {expected}, got {value!r}", param=field)

        warm = self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < math.inf
        require(warm, "temperature", f"0 (greedy) or at least {MIN_TEMPERATURE}")
        require(MIN_TOP_P <= self.top_p <= 1, "top_p", f"between {MIN_TOP_P} and 1")
        require(self.top_k >= 0, "top_k", ">= 0 (0 turns it off)")
        require(0 <= self.min_p <= 1, "min_p", "in [0, 1]")
        require(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "a 64-bit integer")
        require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1")
        require(self.min_tokens >= 0, "min_tokens", ">= 0")
        if self.max_tokens is not None:
            require(self.min_tokens <= self.max_tokens, "min_tokens", "at most max_tokens")
        require(1 <= self.n <= MAX_N, "n", f"between 1 and {MAX_N}")
        require(0 <= self.logprobs <= MAX_LOGPROBS, "logprobs", f"between 0 and {MAX_LOGPROBS}")
        require(
            self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= MAX_LOGPROBS,
            "prompt_logprobs",
            f"between 0 and {MAX_LOGPROBS}",
        )
        require(self.logprob_mode in (None, "raw", "processed"), "logprob_mode", "raw or processed")
        require(self.allowed_token_ids is None or len(self.allowed_token_ids) > 0,
                "allowed_token_ids", "a list with at least one id")  # fmt: skip
        for token, bias in (self.logit_bias or {}).items():
            if not abs(bias) <= MAX_BIAS:
                raise BadRequest(
                    f"logit_bias must be between -{MAX_BIAS:g} and {MAX_BIAS:g}, got {bias!r} for "
                    f"token {token}",
                    param="logit_bias",
                )
