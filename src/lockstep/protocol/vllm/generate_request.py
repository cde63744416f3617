"""vLLM's token-in/token-out dialect, POST /inference/v1/generate: requests.

All fields of vLLM 0.32 are known. A field without support is accepted at its neutral value and
otherwise rejected by name, so that stock clients work and nothing is ignored silently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from lockstep.protocol.common.sampling_fields import NEUTRAL, SamplingFields, read_sampling
from lockstep.protocol.json.lazy_ids import LazyIds
from lockstep.protocol.json.strict import decode, refuse_unless_neutral
from lockstep.tokens import Sampling
from lockstep.tokens.errors import BadRequest
from lockstep.tokens.versions import check_label


class SamplingParams(SamplingFields, kw_only=True):
    """vLLM's SamplingParams. The last block is rejected unless neutral."""

    n: int = 1
    logprobs: int | None = None

    detokenize: bool | None = None
    output_kind: int | None = None
    skip_clone: bool | None = None
    skip_reading_prefix_cache: bool | None = None

    prompt_logprob_token_ids: Any = None
    prompt_logprob_start: int | None = None
    flat_logprobs: bool | None = None
    extra_args: Any = None
    trace_decode_token_ids: Any = None


NEUTRAL_SAMPLING: Mapping[str, tuple[object, ...]] = {
    **NEUTRAL,
    "prompt_logprob_token_ids": ([],),
    "prompt_logprob_start": (0,),
    "flat_logprobs": (False,),
    "extra_args": ({},),
    "trace_decode_token_ids": ([],),
}
"""Fields that are rejected at any other value."""

NEUTRAL_REQUEST: Mapping[str, tuple[object, ...]] = {
    "token_offsets": ([],),
    "features": ([], {}),
    "content_parts": ([],),
    "reasoning_ended": (False, True),  # a grammar applies from the first token here, as with True
    "reasoning_parser_kwargs": ({},),
    "output_mode": ("tokens",),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
}


@dataclass(frozen=True, slots=True)
class Form:
    """Format of a response.

    `flat` logprobs are bare numbers, `npy` is vLLM's string. The support is vLLM's `lists` of
    ids, or `packed` bytes, or None if it was not requested.
    """

    logprobs: Literal["entries", "flat"] | None = "entries"
    prompt_ids: bool = False
    experts: Literal["raw", "npy"] = "raw"
    support: Literal["lists", "packed"] | None = None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerateFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A request body without its ids. The last block is Lockstep's own: required versions,
    requested experts and supports.
    """

    sampling_params: SamplingParams
    request_id: str | None = None
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    priority: int = 0

    token_offsets: Any = None
    features: Any = None
    content_parts: Any = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    output_mode: str = "tokens"
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None

    return_routed_experts: bool | None = None
    routed_experts_format: Literal["raw", "npy"] = "raw"
    return_sampling_mask: bool | None = None
    sampling_mask_format: Literal["lists", "packed"] = "lists"
    logprobs_format: Literal["entries", "flat"] = "entries"
    weight_version: str | None = None
    min_weight_version: str | None = None

    @property
    def experts_start(self) -> int | None:
        """First row of routed experts to return, or None if they were not requested.

        As in vLLM, `routed_experts_prompt_start` alone requests nothing: clients send it with every
        request, also to models without experts.
        """
        return (self.experts_skipped or 0) if self.return_routed_experts else None

    @property
    def experts_skipped(self) -> int | None:
        """Number of rows to omit if the server returns routed experts."""
        return self.sampling_params.routed_experts_prompt_start

    @property
    def support(self) -> bool | None:
        """Whether to return the set that each token was drawn from, as in `GenerateRequest`.

        Unless the request says so, they come beside logprobs only, which mean nothing without.
        """
        if self.return_sampling_mask is None and self.sampling_params.logprobs is None:
            return False
        return self.return_sampling_mask

    @property
    def form(self) -> Form:
        """Format of the response."""
        return Form(
            logprobs=None if self.sampling_params.logprobs is None else self.logprobs_format,
            prompt_ids=bool(self.return_token_ids),
            experts=self.routed_experts_format,
            support=None if self.support is False else self.sampling_mask_format,
        )

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self) -> Sampling:
        """Return the sampling options. Raises BadRequest or UnsupportedField that names the
        field.
        """
        params = self.sampling_params
        return read_sampling(
            params, prefix="sampling_params.", n=params.n, logprobs=params.logprobs or 0
        )


class GenerateBody(GenerateFields, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The request body."""

    token_ids: list[int]


class RelayedBody(GenerateFields, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The request body for relays: the ids, most of its bytes, stay JSON."""

    token_ids: msgspec.Raw


DECODER = msgspec.json.Decoder(GenerateBody)
RELAYED = msgspec.json.Decoder(RelayedBody)


def decode_request(body: bytes) -> GenerateBody:
    """Decode the request in `body`. Raises BadRequest, UnknownField or UnsupportedField."""
    request: GenerateBody = decode(DECODER, body)
    _check(request, request.token_ids)
    return request


def decode_relayed(body: bytes) -> tuple[GenerateFields, Sequence[int]]:
    """Decode as `decode_request`, with the ids separate and decoded only on access."""
    relayed: RelayedBody = decode(RELAYED, body)
    ids = LazyIds.of(relayed.token_ids)
    if ids is None:  # invalid ids: the strict decoder reports what is wrong
        request = decode_request(body)
        return request, request.token_ids
    _check(relayed, ids)
    return relayed, ids


def _check(request: GenerateFields, ids: Sequence[int]) -> None:
    refuse_unless_neutral(request, NEUTRAL_REQUEST)
    refuse_unless_neutral(request.sampling_params, NEUTRAL_SAMPLING, "sampling_params.")
    if request.logprobs_format == "flat" and request.sampling_params.logprobs:
        raise BadRequest(
            "logprobs_format flat has no place for alternatives: send sampling_params.logprobs 0",
            param="logprobs_format",
        )
    if request.cache_salt is not None and not 1 <= len(request.cache_salt) <= 1024:
        raise BadRequest(
            "cache_salt must be a string of 1 to 1024 characters, or left out", param="cache_salt"
        )
    if not -(2**63) <= request.priority < 2**63:
        raise BadRequest(f"priority is {request.priority}: it must fit 64 bits", param="priority")
    for name in ("weight_version", "min_weight_version"):
        if (label := getattr(request, name)) is not None:
            check_label(label, name)
    start = request.experts_skipped
    if start is not None and not 0 <= start <= len(ids):
        raise BadRequest(
            f"sampling_params.routed_experts_prompt_start is {start}: expected a position of the "
            f"prompt, 0 to {len(ids)}",
            param="sampling_params.routed_experts_prompt_start",
        )
