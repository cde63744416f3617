"""Small responses of each dialect, to be broken by tests in one place at a time."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import numpy as np

from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.common.response import Reading
from lockstep.tokens import Sampling

PROMPT = [5, 6, 7]
IDS = [11, 12]
LOGPROBS = [-0.5, -0.25]


def reading(**fields: Any) -> Reading:
    sampling = Sampling(**fields.pop("sampling", {}))
    return Reading(GenerateRequest(prompt_ids=PROMPT, sampling=sampling, **fields))


def entry(token: int, logprob: Any, *, form: str = "vllm") -> dict[str, Any]:
    name: dict[str, Any] = {"token_id": token} if form == "vllm" else {"token": f"token_id:{token}"}
    return {**name, "logprob": logprob}


def generate_choice(index: int = 0, *, form: str = "vllm", **changes: Any) -> dict[str, Any]:
    content = [entry(token, value, form=form) for token, value in zip(IDS, LOGPROBS, strict=True)]
    choice = {
        "index": index,
        "token_ids": list(IDS),
        "finish_reason": "stop",
        "weight_versions": [{"version": "v1", "start": 0, "end": 2}],
        "logprobs": {"content": content},
    }
    return choice | changes


def generate_body(*choices: dict[str, Any], **fields: Any) -> bytes:
    body = {"request_id": "r", "choices": list(choices) or [generate_choice()], **fields}
    return json.dumps(body).encode()


def dynamo_body(engine: dict[str, Any] | None = None, **changes: Any) -> bytes:
    data = {"completion_token_ids": list(IDS), "completion_logprobs": list(LOGPROBS)}
    nvext = {"engine_data": data | (engine or {})} | changes.pop("nvext", {})
    choice = {"index": 0, "finish_reason": "stop", "logprobs": None} | changes
    return json.dumps({"id": "c", "choices": [choice], "nvext": nvext}).encode()


def sglang_body(**changes: Any) -> bytes:
    meta = {
        "id": "s",
        "finish_reason": {"type": "stop", "matched": 12},
        "completion_tokens": 2,
        "weight_version": "v1",
        "output_token_logprobs": [[-0.5, 11, None], [-0.25, 12, None]],
    }
    output = changes.pop("output_ids", list(IDS))
    return json.dumps({"output_ids": output, "meta_info": meta | changes}).encode()


def expert_rows(rows: int) -> np.ndarray:
    return np.arange(rows * 4, dtype=np.uint8).reshape(rows, 2, 2)


def experts_object(rows: int, start: int = 0) -> dict[str, Any]:
    data = base64.b64encode(expert_rows(start + rows)[start:].tobytes()).decode()
    return {"data": data, "shape": [rows, 2, 2], "dtype": "uint8", "start": start}


def experts_npy(rows: int, first: int = 0) -> str:
    file = io.BytesIO()
    np.save(file, expert_rows(first + rows)[first:])
    return base64.b64encode(file.getvalue()).decode()
