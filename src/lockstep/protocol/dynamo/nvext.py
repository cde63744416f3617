"""Dynamo's extension of chat requests, `nvext`: its fields in requests and responses.

Every key of Dynamo 1.6 is known. A key without support here is accepted at its neutral value and
otherwise rejected by name; Dynamo itself ignores some of them silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from lockstep.protocol.common.prompt_logprobs import PromptField
from lockstep.protocol.json.lazy_ids import as_list
from lockstep.protocol.json.strict import refuse_unless_neutral
from lockstep.protocol.vllm.generate_response import ExpertsField
from lockstep.tokens import Completion, VersionSpan
from lockstep.tokens.errors import BadRequest, UnknownField

EXTRA_FIELDS = (
    "engine_data",
    "completion_token_ids",
    "prompt_token_ids",
    "prompt_logprobs",
    "routed_experts",
    "worker_id",
    "timing",
)
"""Names that Dynamo 1.6 knows; it silently ignores any other, so others are rejected here."""
ONE_CHOICE = frozenset({"engine_data", "completion_token_ids", "routed_experts", "worker_id"})
"""Fields that Dynamo's response has only once: with n > 1 those of other choices would be lost."""


class AgentHints(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Hints of an agent. Only `priority` has an effect: higher is sooner, unlike in vLLM."""

    priority: int | None = None
    osl: int | None = None
    latency_sensitivity: float | None = None
    speculative_prefill: bool | None = None


class NvExt(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The request's extension. Fields below the line are rejected unless neutral."""

    token_data: list[int] | None = None
    extra_fields: list[str] | None = None
    cache_salt: str | None = None
    agent_hints: AgentHints | None = None
    backend_instance_id: int | str | None = None
    decode_worker_id: int | str | None = None
    request_timestamp_ms: float | None = None

    annotations: list[str] | None = None
    dp_rank: int | None = None
    greed_sampling: bool | None = None
    max_thinking_tokens: int | None = None
    metadata_upload: Any = None
    prefill_dp_rank: int | None = None
    prefill_worker_id: int | None = None
    router: Any = None
    routing_constraints: Any = None
    use_raw_prompt: bool | None = None

    @property
    def requested_fields(self) -> frozenset[str]:
        """The extra fields to return."""
        return frozenset(self.extra_fields or ())

    @property
    def pinned(self) -> str | None:
        """Id of the worker that must serve this request."""
        worker = self.backend_instance_id
        worker = self.decode_worker_id if worker is None else worker
        return None if worker is None else str(worker)

    @property
    def priority(self) -> int | None:
        """The priority in vLLM's sign, or None."""
        hints = self.agent_hints
        return None if hints is None or hints.priority is None else -hints.priority


NEUTRAL: dict[str, tuple[object, ...]] = {
    "annotations": ([],),
    "dp_rank": (0,),
    "greed_sampling": (False,),
    "max_thinking_tokens": (),
    "metadata_upload": ({},),
    "prefill_dp_rank": (0,),
    "prefill_worker_id": (),
    "router": ({},),
    "routing_constraints": ({},),
    "use_raw_prompt": (False,),
}


def check_nvext(nvext: NvExt, n: int) -> None:
    """Raise BadRequest, UnknownField or UnsupportedField that names the key."""
    refuse_unless_neutral(nvext, NEUTRAL, "nvext.")
    if nvext.agent_hints is not None:
        refuse_unless_neutral(
            nvext.agent_hints, {"speculative_prefill": (False,)}, "nvext.agent_hints."
        )
    if unknown := sorted(nvext.requested_fields - set(EXTRA_FIELDS)):
        raise UnknownField(
            f"nvext.extra_fields has {unknown[0]!r}: expected some of {', '.join(EXTRA_FIELDS)}",
            param="nvext.extra_fields",
        )
    if n > 1 and (lost := sorted(nvext.requested_fields & ONE_CHOICE)):
        raise BadRequest(
            f"nvext.extra_fields has {lost[0]!r}, which holds one choice, but n is {n}: "
            "send n=1, or use return_token_ids, which is per choice",
            param="nvext.extra_fields",
        )
    both = (nvext.backend_instance_id, nvext.decode_worker_id)
    if None not in both and both[0] != both[1]:
        raise BadRequest(
            f"nvext.backend_instance_id is {both[0]!r}, but nvext.decode_worker_id is {both[1]!r}: "
            "name one worker",
            param="nvext.backend_instance_id",
        )


class EngineData(msgspec.Struct, kw_only=True):
    """The engine's own record, complete and in its own precision."""

    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    completion_logprobs: list[float]
    finished: bool
    finish_reason: str
    weight_version: str | None
    weight_versions: Sequence[VersionSpan]
    logprob_mode: str
    adapter: str | None

    @classmethod
    def of(cls, completion: Completion) -> EngineData:
        return cls(
            prompt_token_ids=as_list(completion.prompt_ids),
            completion_token_ids=completion.token_ids,
            completion_logprobs=completion.logprobs,
            finished=True,
            finish_reason=completion.finish,
            weight_version=completion.versions[-1].version if completion.versions else None,
            weight_versions=completion.versions,
            logprob_mode=completion.logprob_mode,
            adapter=completion.adapter,
        )


class WorkerId(msgspec.Struct):
    prefill_worker_id: int
    decode_worker_id: int


class Timing(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Durations in milliseconds; `ttft_ms` only if tokens arrived one by one."""

    request_received_ms: int
    ttft_ms: float | None = None
    total_time_ms: float


class NvextResponse(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The response's extension: the fields requested with extra_fields, and nothing else."""

    worker_id: WorkerId | None = None
    completion_token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptField | None = None
    timing: Timing | None = None
    routed_experts: ExpertsField | str | None = None
    engine_data: EngineData | None = None


def worker_id(worker: str | None) -> WorkerId | None:
    """Return Dynamo's pair of ids, which are integers."""
    return None if worker is None else WorkerId(instance_id(worker), instance_id(worker))


def instance_id(worker: str) -> int:
    """Return the integer for a worker's id; small enough for readers that use floats."""
    if worker.isdecimal():
        return int(worker)
    return int.from_bytes(blake2b(worker.encode(), digest_size=6).digest(), "big")
