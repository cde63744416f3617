"""The sampling options as JSON fields: read from every request body, and written in every dialect.

Chat, completions and vLLM's sampling_params share one struct, so an option is declared once. A
dialect with names of its own has a table from the fields of `Sampling` to those names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from operator import attrgetter
from typing import Any

import msgspec

from lockstep.protocol.common.structured_outputs import (
    GRAMMAR_FIELDS,
    StructuredOutputs,
    read_grammar,
)
from lockstep.protocol.json.strict import read_biases
from lockstep.tokens import LogprobMode, Sampling


class SamplingFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Options of a request body; null is the default of `Sampling`.

    The second block only shapes text and has no effect on tokens; the last one is refused unless
    neutral (`NEUTRAL`).
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: int | None = None
    score_start: int | None = None
    logprob_mode: LogprobMode | None = None
    routed_experts_prompt_start: int | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None

    bad_words: list[str] | None = None
    watermarking: Any = None
    logprob_token_ids: list[int] | None = None
    thinking_token_budget: int | None = None
    repetition_detection: Any = None
    stream_interval: int | None = None


NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "bad_words": ([],),
    "watermarking": (False,),
    "logprob_token_ids": ([],),
    "thinking_token_budget": (),
    "repetition_detection": (),
    "stream_interval": (1,),
}
"""Fields that cannot be honoured: refused at any value but null and these."""

_grammar_fields = attrgetter(*GRAMMAR_FIELDS)
NO_GRAMMAR = (None,) * len(GRAMMAR_FIELDS)
OPTIONS = tuple(field.name for field in fields(Sampling))
BY_NAME = tuple(name for name in OPTIONS if name in SamplingFields.__struct_fields__)
"""Options that a body has under their own name. The others differ in type or meaning between
dialects (`n`, `logprobs`), so that each passes them to `read_sampling` itself, or come in several
fields (`grammar`)."""
LEFT_OUT_WHEN_OFF = frozenset(
    {"min_tokens", "stop", "stop_token_ids", "ignore_eos", "presence_penalty", "frequency_penalty"}
)
"""Options that no server has a default of its own for: saying that they are off adds nothing."""


def read_sampling(body: SamplingFields, *, prefix: str = "", **own: Any) -> Sampling:
    """The options of a body as a value; `own` are those that its dialect has decided itself.

    `prefix` is where the fields stand, for errors. Raises BadRequest that names the field.
    """
    options: dict[str, Any] = {}
    for name in BY_NAME:
        if (value := getattr(body, name)) is not None:
            # Without repeated ids: a list of the same id, a million times, is one id.
            options[name] = tuple(dict.fromkeys(value)) if isinstance(value, list) else value
    if body.stop is not None:
        stops = [body.stop] if isinstance(body.stop, str) else body.stop
        options["stop"] = tuple(dict.fromkeys(stops))
    if body.top_k == -1:
        options["top_k"] = 0  # the other spelling of "off"
    if body.logit_bias is not None:
        options["logit_bias"] = read_biases(body.logit_bias, f"{prefix}logit_bias")
    # Most requests have no grammar: looking at the fields first is cheaper than reading them.
    if _grammar_fields(body) != NO_GRAMMAR or getattr(body, "response_format", None) is not None:
        options["grammar"] = read_grammar(body, prefix)
    return Sampling(**(options | own))


def write_sampling(
    sampling: Sampling, names: Mapping[str, str | None], left_out: Collection[str] = ()
) -> dict[str, Any]:
    """The options as JSON under the `names` of a dialect, except those whose name is None.

    What has a value is spelt out, so that no default of the server's slips in; options in
    `left_out` only when they are on.
    """
    body: dict[str, Any] = {}
    for option, name in names.items():
        if name is None or (value := getattr(sampling, option)) is None:
            continue
        if value or option not in left_out:
            body[name] = value
    if sampling.logit_bias is not None and (name := names["logit_bias"]) is not None:
        body[name] = dict(sampling.logit_bias)  # JSON takes no other mapping
    return body
