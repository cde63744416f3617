"""Decoding of requests from Dynamo's frontend into requests of Lockstep's own data port.

Both token-in routes of the frontend end here: chat, which arrives in Dynamo's fields and with
floats cut to 32 bits, and /inference/v1/generate, whose body is included as it was sent.
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
"""Key under which the frontend passes the body of POST /inference/v1/generate."""
SAME_NAME = frozenset(OPTIONS)
UNSUPPORTED = ("best_of", "use_beam_search", "length_penalty")
ENGINE_FIELDS = frozenset({"engine_data", "routed_experts", "prompt_logprobs"})
"""Extra fields that the frontend copies from the worker's response."""


@dataclass(frozen=True, slots=True)
class DynamoRequest:
    """A request, and what its response must contain.

    `verbatim` marks a request to /inference/v1/generate, whose responses have no field for
    versions, logprob modes and aborts.
    """

    body: GenerateBody
    engine_data: bool
    verbatim: bool


def read_request(fields: Fields, *, has_experts: bool) -> DynamoRequest:
    """Return the request. Raises BadRequest, UnknownField or UnsupportedField that names the field.

    `has_experts` says that the model is a mixture of experts. /inference/v1/generate has no field
    to request routed experts, so they are always returned there.
    """
    extra: Fields = fields.get("extra_args") or {}
    if VERBATIM in extra:
        body = _verbatim(fields, extra[VERBATIM], has_experts)
        return DynamoRequest(body, engine_data=body.experts_start is not None, verbatim=True)
    wanted = set((extra.get("nvext") or {}).get("extra_fields") or ())
    engine_data = bool(wanted & ENGINE_FIELDS)
    body = decode_request(msgspec.json.encode(_body(fields, extra, wanted)))
    if engine_data:
        _reject_lossy(fields, body)
    return DynamoRequest(body, engine_data=engine_data, verbatim=False)


def _verbatim(fields: Fields, sent: Fields, has_experts: bool) -> GenerateBody:
    params = dict(sent.get("sampling_params") or {})
    # The response has no field for the mode, so use that of Dynamo's own workers for RL.
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
    for name in UNSUPPORTED:
        if sampling.get(name) not in (None, False):
            raise UnsupportedField(
                f"{name} is {sampling[name]!r}: this engine does not support it, leave it out",
                param=name,
            )
    engine_options: Fields = extra.get("sampling_options") or {}
    body: Fields = {
        "token_ids": fields["token_ids"],
        "model": routing.get("lora_name") or fields.get("model"),
        "cache_salt": routing.get("cache_salt"),
        # In Dynamo a higher priority runs sooner, in the engine a lower one.
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
            **{name: value for name, value in engine_options.items() if value is not None},
        },
    }
    start = next((a for a in fields.get("annotations") or () if a.startswith(EXPERTS_FROM)), None)
    if start is not None:
        body["sampling_params"]["routed_experts_prompt_start"] = _row_number(start)
    if start is not None or "routed_experts" in wanted:
        body["return_routed_experts"] = True
    return body


def _reject_lossy(fields: Fields, body: GenerateBody) -> None:
    """Raise UnsupportedField where the frontend would drop requested data."""
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
    """Return Dynamo's guided_decoding in vLLM's fields, without its choice of a backend."""
    if guided is None:
        return None
    return {name: value for name, value in guided.items() if name != "backend" and value}


def _stop_ids(stops: Fields) -> list[int] | None:
    """Return the stop ids of the request, and the model's end tokens unless they are ignored."""
    ids = [*(stops.get("stop_token_ids") or ()), *(stops.get("stop_token_ids_visible") or ())]
    if not stops.get("ignore_eos"):
        ids += stops.get("stop_token_ids_hidden") or ()
    return list(dict.fromkeys(ids)) or None


def _row_number(annotation: str) -> int:
    text = annotation.removeprefix(EXPERTS_FROM)
    if not text.isdigit():
        raise UnsupportedField(
            f"annotation {annotation!r}: expected a row number after {EXPERTS_FROM!r}",
            param="nvext.annotations",
        )
    return int(text)


def decimal(value: float) -> float:
    """Return the shortest decimal that rounds to `value` in 32 bits: 0.7, not 0.699999988079071."""
    return float(str(np.float32(value)))
