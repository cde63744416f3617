"""Responses of the benchmark's upstream: the bytes of vLLM 0.32 or of a Lockstep worker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from benchmarks.gateway.traffic import MODEL, CannedCompletion
from lockstep.http import sse
from lockstep.protocol.vllm.generate_request import Form
from lockstep.protocol.vllm.generate_response import GenerateStreamEncoder, generate_response
from lockstep.tokens import Completion, VersionSpan

CREATED = 1_794_705_827
VERSION = "default"
REQUEST_ID = "generate-tokens-9e9a490058c9a21f"
CARDS: dict[str, dict[str, Any]] = {
    "vllm": {"root": MODEL, "parent": None},
    "lockstep": {"weight_version": VERSION},
}


def models(owner: str) -> bytes:
    card: dict[str, Any] = {"id": MODEL, "object": "model", "created": CREATED, "owned_by": owner}
    card |= {"max_model_len": 40_960, **CARDS[owner]}
    return compact({"object": "list", "data": [card]})


def body(owner: str, path: str, completion: CannedCompletion, prompt: int, flag: bool) -> bytes:
    """The whole response of `path`. `flag`: with ids, or, on the generate route of a Lockstep
    worker, with bare logprobs."""
    if path == "/v1/chat/completions":
        return chat(completion, prompt, ids=flag)
    if path == "/v1/completions":
        return completions(completion, prompt, ids=flag)
    if owner == "vllm":
        return vllm_generate(completion, prompt)
    return lockstep_generate(completion, prompt, flat=flag)


def events(
    owner: str, path: str, completion: CannedCompletion, prompt: int, flag: bool
) -> list[bytes]:
    """The same as a stream: an event per token, and the end."""
    if path == "/v1/chat/completions":
        return chat_events(completion, prompt, ids=flag)
    if path == "/v1/completions":
        return completions_events(completion, prompt, ids=flag)
    if owner == "vllm":
        return vllm_generate_events(completion)
    return lockstep_generate_events(completion, prompt, flat=flag)


def compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _events(chunks: Iterator[bytes]) -> list[bytes]:
    """The pieces of a stream, its end among them."""
    return [*(b"data: " + chunk + b"\n\n" for chunk in chunks), sse.DONE]


def usage(completion: CannedCompletion, prompt: int) -> dict[str, Any]:
    out = len(completion.ids)
    made = {"prompt_tokens": prompt, "total_tokens": prompt + out, "completion_tokens": out}
    return made | {"prompt_tokens_details": None, "completion_tokens_details": None}


def vllm_generate(completion: CannedCompletion, prompt: int) -> bytes:
    choices = [_vllm_choice(completion, 0, len(completion.ids))]
    body = {"request_id": REQUEST_ID, "model": MODEL, "created": CREATED}
    body |= {"usage": usage(completion, prompt), "prompt_logprobs": None}
    body |= {"prompt_token_id_logprobs": None, "prompt_token_ids": None, "mm_placeholders": None}
    body |= {"metrics": None, "kv_transfer_params": None, "ec_transfer_params": None}
    return compact(body | {"output_mode": "tokens", "choices": choices})


def vllm_generate_events(completion: CannedCompletion) -> list[bytes]:
    def chunks() -> Iterator[bytes]:
        for at in range(len(completion.ids)):
            choice = _vllm_choice(completion, at, at + 1)
            yield compact({"request_id": REQUEST_ID, "usage": None, "output_mode": "tokens",
                           "choices": [choice]})  # fmt: skip

    return _events(chunks())


def _vllm_choice(completion: CannedCompletion, start: int, end: int) -> dict[str, Any]:
    content = []
    for token, logprob in zip(
        completion.ids[start:end], completion.logprobs[start:end], strict=True
    ):
        entry = {"token_id": token, "logprob": logprob, "rank": 1}
        content.append({**entry, "top_logprobs": [entry]})
    last = end == len(completion.ids)
    return {
        "index": 0,
        "finish_reason": "stop" if last else None,
        "stop_reason": None,
        "token_ids": completion.ids[start:end],
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": [{"version": VERSION, "start": 0, "end": end}] if last else None,
        "logprobs": {"content": content},
    }


def lockstep_generate(completion: CannedCompletion, prompt: int, *, flat: bool) -> bytes:
    return generate_response(
        [_as_completion(completion, prompt)],
        request_id=REQUEST_ID,
        model=MODEL,
        created=CREATED,
        form=Form(logprobs="flat" if flat else "entries"),
    )


def lockstep_generate_events(
    completion: CannedCompletion, prompt: int, *, flat: bool
) -> list[bytes]:
    full = _as_completion(completion, prompt)
    form = Form(logprobs="flat" if flat else "entries")
    stream = GenerateStreamEncoder(REQUEST_ID, full.prompt_ids, form)
    made, last = [], len(completion.ids) - 1
    for at, (token, logprob) in enumerate(zip(completion.ids, completion.logprobs, strict=True)):
        chunk = stream.chunk(0, [token], [logprob], [1], None, full if at == last else None)
        made.append(sse.event(chunk))
    return [*made, sse.DONE]


def _as_completion(completion: CannedCompletion, prompt: int) -> Completion:
    return Completion(
        token_ids=completion.ids,
        logprobs=completion.logprobs,
        ranks=[1] * len(completion.ids),
        prompt_ids=[0] * prompt,
        finish="stop",
        stop_token=completion.ids[-1],
        versions=(VersionSpan(VERSION, 0, len(completion.ids)),),
        worker="w0",
    )


def chat(completion: CannedCompletion, prompt: int, *, ids: bool) -> bytes:
    """With `ids`, as requests with return_token_ids get it: those of the prompt too."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": completion.text,
        "refusal": None,
        "tool_calls": [],
    }
    choice = {"index": 0, "message": message, "finish_reason": "stop", "stop_reason": None}
    choice |= {"logprobs": {"content": _entries(completion, 0, len(completion.ids))}}
    choice |= {"token_ids": completion.ids if ids else None}
    body: dict[str, Any] = {
        "id": "chatcmpl-9e9a490058c9a21f",
        "object": "chat.completion",
        "created": CREATED,
    }
    body |= {"model": MODEL, "choices": [choice], "usage": usage(completion, prompt)}
    return compact(body | {"prompt_token_ids": [100_000] * prompt if ids else None})


def chat_events(completion: CannedCompletion, prompt: int, *, ids: bool) -> list[bytes]:
    def chunks() -> Iterator[bytes]:
        for at in range(len(completion.ids)):
            last = at == len(completion.ids) - 1
            delta = {"content": "" if last else completion.pieces[at]}
            delta |= {"role": "assistant"} if at == 0 else {}
            choice: dict[str, Any] = {
                "index": 0,
                "delta": delta,
                "finish_reason": "stop" if last else None,
            }
            choice |= {"logprobs": {"content": _entries(completion, at, at + 1)}}
            choice |= {"token_ids": [completion.ids[at]]} if ids else {}
            body: dict[str, Any] = {
                "id": "chatcmpl-9e9a490058c9a21f",
                "object": "chat.completion.chunk",
            }
            body |= {"created": CREATED, "model": MODEL, "choices": [choice]}
            yield compact(
                body | ({"prompt_token_ids": [100_000] * prompt} if ids and not at else {})
            )

    return _events(chunks())


def _entries(completion: CannedCompletion, start: int, end: int) -> list[dict[str, Any]]:
    pieces = [*completion.pieces, "<|im_end|>"][start:end]
    return [
        {"token": piece, "logprob": logprob, "bytes": [*piece.encode()], "top_logprobs": []}
        for piece, logprob in zip(pieces, completion.logprobs[start:end], strict=True)
    ]


def completions(completion: CannedCompletion, prompt: int, *, ids: bool) -> bytes:
    choice = _text_choice(completion, 0, len(completion.ids)) | {
        "token_ids": completion.ids if ids else None
    }
    choice |= {"prompt_token_ids": [100_000] * prompt if ids else None}
    return compact(_text_body(choice) | {"usage": usage(completion, prompt)})


def completions_events(completion: CannedCompletion, prompt: int, *, ids: bool) -> list[bytes]:
    def chunks() -> Iterator[bytes]:
        for at in range(len(completion.ids)):
            choice = _text_choice(completion, at, at + 1)
            choice |= {"token_ids": [completion.ids[at]]} if ids else {}
            choice |= {"prompt_token_ids": [100_000] * prompt} if ids and not at else {}
            yield compact(_text_body(choice))

    return _events(chunks())


def _text_body(choice: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = {
        "id": "cmpl-9e9a490058c9a21f",
        "object": "text_completion",
        "created": CREATED,
    }
    return body | {"model": MODEL, "choices": [choice]}


def _text_choice(completion: CannedCompletion, start: int, end: int) -> dict[str, Any]:
    tokens = [*completion.pieces, "<|im_end|>"][start:end]
    values = completion.logprobs[start:end]
    logprobs = {"text_offset": [0] * len(values), "token_logprobs": values, "tokens": tokens}
    tops = [{token: value} for token, value in zip(tokens, values, strict=True)]
    return {
        "index": 0,
        "text": "".join(completion.pieces[start:end]),
        "logprobs": logprobs | {"top_logprobs": tops},
        "finish_reason": "stop" if end == len(completion.ids) else None,
        "stop_reason": None,
    }
