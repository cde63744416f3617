"""Raw request encodings of each dialect, for requests that a transport would refuse to send."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lockstep.backends.transport import TransportName
from lockstep.protocol.dynamo.encode_chat import PLACEHOLDER

Body = dict[str, Any]
BEYOND = 2**31 - 1
"""A token id outside every vocabulary."""


@dataclass(frozen=True, slots=True)
class RawDialect:
    """A route, the body for some ids, and where a response has the prompt's ids and its own."""

    route: str
    encode: Callable[[str | None, Any, int, int], Body]
    echo: Callable[[Body], list[int] | None]
    ids: Callable[[Body], list[list[int]]]
    usage: Callable[[Body], int | None]
    chat_ids_option: Body = field(default_factory=lambda: {"return_token_ids": True})
    """Option that makes a chat response include the ids of its prompt."""
    splits_choices: bool = False
    """Whether the transport never sends n > 1 in one request, although the route may accept it."""
    rejected: Body | None = None
    """Fields for which such a server rejects a request before it reaches the model. Known where it
    dies of a token id outside the vocabulary; None where it does not.
    """

    def body(self, model: str | None, ids: Any, *, max_tokens: int = 1, n: int = 1) -> Body:
        body = self.encode(model, ids, max_tokens, n)
        return {key: value for key, value in body.items() if value is not None}


def _generate(model: str | None, ids: Any, max_tokens: int, n: int) -> Body:
    params = {"max_tokens": max_tokens, "temperature": 0.0 if n == 1 else 1.0, "n": n}
    params |= {"logprobs": 0, "ignore_eos": True}
    return {"model": model, "token_ids": ids, "sampling_params": params, "return_token_ids": True}


def _dynamo(model: str | None, ids: Any, max_tokens: int, n: int) -> Body:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": PLACEHOLDER}],
        "temperature": 0.0 if n == 1 else 1.0,
        "max_completion_tokens": max_tokens,
        "ignore_eos": True,
        "logprobs": True,
        "nvext": {"token_data": ids, "extra_fields": ["engine_data"]},
    }
    return body if n == 1 else {**body, "n": n}


def _dynamo_generate(model: str | None, ids: Any, max_tokens: int, n: int) -> Body:
    return {key: value for key, value in _generate(model, ids, max_tokens, n).items()
            if key != "return_token_ids"}  # fmt: skip


def _sglang(model: str | None, ids: Any, max_tokens: int, n: int) -> Body:
    params = {"max_new_tokens": max_tokens, "temperature": 0.0 if n == 1 else 1.0, "n": n}
    params["ignore_eos"] = True
    return {"input_ids": ids, "sampling_params": params, "return_logprob": True}


def engine_data(response: Body) -> Body:
    """Return the worker's own fields in a response of Dynamo's frontend; empty in other
    dialects.
    """
    return dict((response.get("nvext") or {}).get("engine_data") or {})


def _dynamo_ids(response: Body) -> list[list[int]]:
    ids = engine_data(response).get("completion_token_ids")
    return [] if ids is None else [ids]


def _choice_ids(response: Body) -> list[list[int]]:
    return [choice["token_ids"] for choice in response.get("choices", ()) if "token_ids" in choice]


def _used(response: Body, key: str = "usage") -> int | None:
    count = (response.get(key) or {}).get("prompt_tokens")
    return count if isinstance(count, int) else None


GENERATE = "/inference/v1/generate"
DIALECTS: dict[TransportName, RawDialect] = {
    "vllm": RawDialect(
        GENERATE, _generate, lambda response: response.get("prompt_token_ids"), _choice_ids, _used
    ),
    "dynamo": RawDialect(
        "/v1/chat/completions",
        _dynamo,
        lambda response: engine_data(response).get("prompt_token_ids"),
        _dynamo_ids,
        _used,
        chat_ids_option={"nvext": {"extra_fields": ["prompt_token_ids"]}},
        splits_choices=True,
    ),
    "dynamo-generate": RawDialect(
        GENERATE, _dynamo_generate, lambda _: None, _choice_ids, _used, splits_choices=True
    ),
    "sglang": RawDialect(
        "/generate",
        _sglang,
        lambda _: None,
        lambda response: [response["output_ids"]] if "output_ids" in response else [],
        lambda response: _used(response, "meta_info"),
        rejected={"token_ids_logprob": [BEYOND]},
    ),
}  # fmt: skip
