"""The answers of the benchmark's upstream, byte for byte as vLLM 0.32 or a Lockstep worker would
write them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from benchmarks.gateway.traffic import MODEL, Said
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


def body(owner: str, path: str, said: Said, prompt: int, flag: bool) -> bytes:
    """The whole answer to a request for `path`. `flag`: ids were asked for too, or, on the
    generate route, that a Lockstep worker give bare logprobs."""
    if path == "/v1/chat/completions":
        return chat(said, prompt, ids=flag)
    if path == "/v1/completions":
        return completions(said, prompt, ids=flag)
    if owner == "vllm":
        return vllm_generate(said, prompt)
    return lockstep_generate(said, prompt, flat=flag)


def events(owner: str, path: str, said: Said, prompt: int, flag: bool) -> list[bytes]:
    """The same as a stream: an event per token, and the end."""
    if path == "/v1/chat/completions":
        return chat_events(said, prompt, ids=flag)
    if path == "/v1/completions":
        return completions_events(said, prompt, ids=flag)
    if owner == "vllm":
        return vllm_generate_events(said)
    return lockstep_generate_events(said, prompt, flat=flag)


def compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _events(chunks: Iterator[bytes]) -> list[bytes]:
    """The pieces of a stream, its end among them."""
    return [*(b"data: " + chunk + b"\n\n" for chunk in chunks), sse.DONE]


def usage(said: Said, prompt: int) -> dict[str, Any]:
    out = len(said.ids)
    made = {"prompt_tokens": prompt, "total_tokens": prompt + out, "completion_tokens": out}
    return made | {"prompt_tokens_details": None, "completion_tokens_details": None}


def vllm_generate(said: Said, prompt: int) -> bytes:
    choice = _vllm_choice(said, 0, len(said.ids))
    body = {"request_id": REQUEST_ID, "model": MODEL, "created": CREATED}
    body |= {"usage": usage(said, prompt), "prompt_logprobs": None}
    body |= {"prompt_token_id_logprobs": None, "prompt_token_ids": None, "mm_placeholders": None}
    body |= {"metrics": None, "kv_transfer_params": None, "ec_transfer_params": None}
    return compact(body | {"output_mode": "tokens", "choices": [choice]})


def vllm_generate_events(said: Said) -> list[bytes]:
    def chunks() -> Iterator[bytes]:
        for at in range(len(said.ids)):
            choice = _vllm_choice(said, at, at + 1)
            yield compact({"request_id": REQUEST_ID, "usage": None, "output_mode": "tokens",
                           "choices": [choice]})  # fmt: skip

    return _events(chunks())


def _vllm_choice(said: Said, start: int, end: int) -> dict[str, Any]:
    content = []
    for token, logprob in zip(said.ids[start:end], said.logprobs[start:end], strict=True):
        entry = {"token_id": token, "logprob": logprob, "rank": 1}
        content.append({**entry, "top_logprobs": [entry]})
    last = end == len(said.ids)
    return {
        "index": 0,
        "finish_reason": "stop" if last else None,
        "stop_reason": None,
        "token_ids": said.ids[start:end],
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": [{"version": VERSION, "start": 0, "end": end}] if last else None,
        "logprobs": {"content": content},
    }


def lockstep_generate(said: Said, prompt: int, *, flat: bool) -> bytes:
    return generate_response(
        [_completion(said, prompt)],
        request_id=REQUEST_ID,
        model=MODEL,
        created=CREATED,
        form=Form(logprobs="flat" if flat else "entries"),
    )


def lockstep_generate_events(said: Said, prompt: int, *, flat: bool) -> list[bytes]:
    done = _completion(said, prompt)
    form = Form(logprobs="flat" if flat else "entries")
    stream = GenerateStreamEncoder(REQUEST_ID, done.prompt_ids, form)
    made, last = [], len(said.ids) - 1
    for at, (token, logprob) in enumerate(zip(said.ids, said.logprobs, strict=True)):
        chunk = stream.chunk(0, [token], [logprob], [1], None, done if at == last else None)
        made.append(sse.event(chunk))
    return [*made, sse.DONE]


def _completion(said: Said, prompt: int) -> Completion:
    return Completion(
        token_ids=said.ids,
        logprobs=said.logprobs,
        ranks=[1] * len(said.ids),
        prompt_ids=[0] * prompt,
        finish="stop",
        stop_token=said.ids[-1],
        versions=(VersionSpan(VERSION, 0, len(said.ids)),),
        worker="w0",
    )


def chat(said: Said, prompt: int, *, ids: bool) -> bytes:
    """With `ids`, as who sets return_token_ids gets it: those of the prompt too."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": said.text,
        "refusal": None,
        "tool_calls": [],
    }
    choice = {"index": 0, "message": message, "finish_reason": "stop", "stop_reason": None}
    choice |= {"logprobs": {"content": _entries(said, 0, len(said.ids))}}
    choice |= {"token_ids": said.ids if ids else None}
    body: dict[str, Any] = {
        "id": "chatcmpl-9e9a490058c9a21f",
        "object": "chat.completion",
        "created": CREATED,
    }
    body |= {"model": MODEL, "choices": [choice], "usage": usage(said, prompt)}
    return compact(body | {"prompt_token_ids": [100_000] * prompt if ids else None})


def chat_events(said: Said, prompt: int, *, ids: bool) -> list[bytes]:
    def chunks() -> Iterator[bytes]:
        for at in range(len(said.ids)):
            last = at == len(said.ids) - 1
            delta = {"content": "" if last else said.pieces[at]}
            delta |= {"role": "assistant"} if at == 0 else {}
            choice: dict[str, Any] = {
                "index": 0,
                "delta": delta,
                "finish_reason": "stop" if last else None,
            }
            choice |= {"logprobs": {"content": _entries(said, at, at + 1)}}
            choice |= {"token_ids": [said.ids[at]]} if ids else {}
            body: dict[str, Any] = {
                "id": "chatcmpl-9e9a490058c9a21f",
                "object": "chat.completion.chunk",
            }
            body |= {"created": CREATED, "model": MODEL, "choices": [choice]}
            yield compact(
                body | ({"prompt_token_ids": [100_000] * prompt} if ids and not at else {})
            )

    return _events(chunks())


def _entries(said: Said, start: int, end: int) -> list[dict[str, Any]]:
    pieces = [*said.pieces, "<|im_end|>"][start:end]
    return [
        {"token": piece, "logprob": logprob, "bytes": [*piece.encode()], "top_logprobs": []}
        for piece, logprob in zip(pieces, said.logprobs[start:end], strict=True)
    ]


def completions(said: Said, prompt: int, *, ids: bool) -> bytes:
    choice = _text_choice(said, 0, len(said.ids)) | {"token_ids": said.ids if ids else None}
    choice |= {"prompt_token_ids": [100_000] * prompt if ids else None}
    return compact(_text_body(choice) | {"usage": usage(said, prompt)})


def completions_events(said: Said, prompt: int, *, ids: bool) -> list[bytes]:
    def chunks() -> Iterator[bytes]:
        for at in range(len(said.ids)):
            choice = _text_choice(said, at, at + 1)
            choice |= {"token_ids": [said.ids[at]]} if ids else {}
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


def _text_choice(said: Said, start: int, end: int) -> dict[str, Any]:
    tokens = [*said.pieces, "<|im_end|>"][start:end]
    values = said.logprobs[start:end]
    logprobs = {"text_offset": [0] * len(values), "token_logprobs": values, "tokens": tokens}
    tops = [{token: value} for token, value in zip(tokens, values, strict=True)]
    return {
        "index": 0,
        "text": "".join(said.pieces[start:end]),
        "logprobs": logprobs | {"top_logprobs": tops},
        "finish_reason": "stop" if end == len(said.ids) else None,
        "stop_reason": None,
    }
