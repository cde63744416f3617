"""Reads a request of Dynamo's frontend as the request that Lockstep's own data port reads.

Both of its token-in routes end here: chat, which arrives in Dynamo's own words and with its
numbers cut to 32 bits, and /inference/v1/generate, which arrives beside them as it was sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from lockstep.protocol.common.sampling_fields import OPTIONS
from lockstep.protocol.dynamo.encode_chat import EXPERTS_FROM
from lockstep.protocol.vllm.generate_request import GenerateBody, decode_request
from lockstep.tokens.errors import UnsupportedField

Fields = dict[str, Any]
VERBATIM = "vllm_tito"
"""Where the frontend puts the body of POST /inference/v1/generate."""
SAME_NAME = frozenset(OPTIONS)
REFUSED = ("best_of", "use_beam_search", "length_penalty")
ENGINE_FIELDS = frozenset({"engine_data", "routed_experts", "prompt_logprobs"})
"""Extra fields that the frontend takes from the worker's response."""


@dataclass(frozen=True, slots=True)
class DynamoRequest:
    """A request, and what its response must hold.

    `verbatim` says that it came by /inference/v1/generate, whose responses have no field for
    versions, logprob modes and aborts.
    """

    body: GenerateBody
    engine_data: bool
    verbatim: bool


def read_request(fields: Fields, *, has_experts: bool) -> DynamoRequest:
    """The request. Raises BadRequest, UnknownField or UnsupportedField that names the field.

    `has_experts` says that the model is a mixture of experts: /inference/v1/generate has no field
    that requests them, so they always come there.
    """
    extra: Fields = fields.get("extra_args") or {}
    if VERBATIM in extra:
        body = _verbatim(fields, extra[VERBATIM], has_experts)
        return DynamoRequest(body, engine_data=body.experts_start is not None, verbatim=True)
    wanted = set((extra.get("nvext") or {}).get("extra_fields") or ())
    engine_data = bool(wanted & ENGINE_FIELDS)
    body = decode_request(msgspec.json.encode(_body(fields, extra, wanted)))
    if engine_data:
        _refuse_lossy(fields, body)
    return DynamoRequest(body, engine_data=engine_data, verbatim=False)


def _verbatim(fields: Fields, sent: Fields, has_experts: bool) -> GenerateBody:
    params = dict(sent.get("sampling_params") or {})
    # The response cannot say how they were made, so it is what Dynamo's workers for RL do.
    params.setdefault("logprob_mode", "processed")
    body = {**sent, "sampling_params": params, "token_ids": fields["token_ids"], "stream": False}
    if has_experts:
        body["return_routed_experts"] = True
    return decode_request(msgspec.json.encode(body))


def _body(fields: Fields, extra: Fields, wanted: set[str]) -> Fields:
    sampling: Fields = fields.get("sampling_options") or {}
    stops: Fields = fields.get("stop_conditions") or {}
    output: Fields = fields.get("output_options") or {}
    routing: Fields = fields.get("routing") or {}
    for name in REFUSED:
        if sampling.get(name) not in (None, False):
            raise UnsupportedField(
                f"{name} is {sampling[name]!r}: this engine does not support it, leave it out",
                param=name,
            )
    passed: Fields = extra.get("sampling_options") or {}
    body: Fields = {
        "token_ids": fields["token_ids"],
        "model": routing.get("lora_name") or fields.get("model"),
        "cache_salt": routing.get("cache_salt"),
        # Dynamo's higher is sooner; the engine's lower is.
        "priority": -int(routing.get("priority") or 0),
        "sampling_params": {
            **{
                name: decimal(value) if isinstance(value, float) else value
                for name, value in sampling.items()
                if name in SAME_NAME and value is not None
            },
            "max_tokens": stops.get("max_tokens"),
            "min_tokens": stops.get("min_tokens"),
            "ignore_eos": stops.get("ignore_eos"),
            "stop_token_ids": _stop_ids(stops),
            "thinking_token_budget": stops.get("max_thinking_tokens"),
            "structured_outputs": _grammar(sampling.get("guided_decoding")),
            "logprobs": output.get("logprobs"),
            "prompt_logprobs": output.get("prompt_logprobs"),
            **{name: value for name, value in passed.items() if value is not None},
        },
    }
    start = next((a for a in fields.get("annotations") or () if a.startswith(EXPERTS_FROM)), None)
    if start is not None:
        body["sampling_params"]["routed_experts_prompt_start"] = _whole(start)
    if start is not None or "routed_experts" in wanted:
        body["return_routed_experts"] = True
    return body


def _refuse_lossy(fields: Fields, body: GenerateBody) -> None:
    """Raises UnsupportedField where the frontend would drop what it must return."""
    stop = (fields.get("stop_conditions") or {}).get("stop")
    if stop:
        raise UnsupportedField(
            f"stop is {stop!r}: Dynamo's frontend cuts the text there and loses engine_data; stop "
            "by token ids (stop_token_ids), or do not request engine_data",
            param="stop",
        )
    if body.sampling_params.n > 1:
        raise UnsupportedField(
            f"n is {body.sampling_params.n}: Dynamo's response holds the engine_data of one "
            "choice only; send n requests",
            param="n",
        )


def _grammar(guided: Fields | None) -> Fields | None:
    """Dynamo's guided_decoding in vLLM's words; which library shall hold to it is ours to say."""
    if guided is None:
        return None
    return {name: value for name, value in guided.items() if name != "backend" and value}


def _stop_ids(stops: Fields) -> list[int] | None:
    """Those of the request, and the model card's end tokens unless they are to be ignored."""
    ids = [*(stops.get("stop_token_ids") or ()), *(stops.get("stop_token_ids_visible") or ())]
    if not stops.get("ignore_eos"):
        ids += stops.get("stop_token_ids_hidden") or ()
    return list(dict.fromkeys(ids)) or None


def _whole(annotation: str) -> int:
    text = annotation.removeprefix(EXPERTS_FROM)
    if not text.isdigit():
        raise UnsupportedField(
            f"annotation {annotation!r}: expected a row number after {EXPERTS_FROM!r}",
            param="nvext.annotations",
        )
    return int(text)


def decimal(value: float) -> float:
    """The shortest decimal that 32 bits hold as `value`: 0.7 again, not 0.699999988079071."""
    return float(str(np.float32(value)))
