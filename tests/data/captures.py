"""Reads the recorded requests and responses of real servers that lie beside this file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.protocol.common.request import GenerateRequest
from lockstep.tokens import Sampling

WIRE = Path(__file__).parent / "wire"


@dataclass(frozen=True)
class Capture:
    """One exchange: the body sent, the status, and the raw body that came back."""

    name: str
    path: str
    sent: Any
    status: int
    body: bytes

    @property
    def streamed(self) -> bool:
        return self.body.startswith(b"data:")

    def request(self) -> GenerateRequest:
        """The value that is encoded as this request, as far as a response is read with it."""
        sent = self.sent if isinstance(self.sent, dict) else {}
        nvext = sent.get("nvext") or {}
        ids = sent.get("token_ids") or nvext.get("token_data")
        ids = ids if isinstance(ids, list) and ids and all(type(i) is int for i in ids) else [1]
        params = sent.get("sampling_params") or sent
        logprobs = params.get("logprobs")
        named = bool(params.get("return_tokens_as_token_ids"))
        top = params.get("top_logprobs", 0) * named if logprobs is True else logprobs or 0
        # vLLM counts the sampled token among those it lists.
        top = max(top - 1, 0) if "sampling_params" in sent else top
        prompt_logprobs = params.get("prompt_logprobs")
        extra = nvext.get("extra_fields") or []
        if (
            prompt_logprobs is None
            and "prompt_logprobs" in extra
            and b'"prompt_logprobs": [' in self.body
        ):
            prompt_logprobs = 0
        sampling = Sampling(
            n=1 if "nvext" in sent else min(params.get("n", 1), 8),
            logprobs=min(max(top, 0), 20),
            prompt_logprobs=prompt_logprobs,
            temperature=max(params.get("temperature", 1.0), 0.0),
            stop_token_ids=tuple(params.get("stop_token_ids") or ()),
        )
        return GenerateRequest(
            prompt_ids=[i for i in ids if 0 <= i < 2**40] or [1], sampling=sampling
        )


def load(server: str, name: str) -> Capture:
    capture = json.loads((WIRE / server / f"{name}.json").read_text())
    request = capture["request"]
    response = capture["response"] if server == "dynamo" else capture
    body = response["body"] if server == "dynamo" else response["response"]
    raw = body if isinstance(body, str) else json.dumps(body)
    return Capture(name, request["path"], request.get("body"), response["status"], raw.encode())


def names(server: str, path: str) -> list[str]:
    """The captures of one route, except lists of several exchanges."""
    stems = []
    for file in sorted((WIRE / server).glob("*.json")):
        content = json.loads(file.read_text())
        if isinstance(content, dict) and content["request"]["path"] == path:
            stems.append(file.stem)
    return stems
