"""Reads the recorded requests and answers of real servers that lie beside this file."""

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
    """One exchange: what was asked, the status, and the raw body that came back."""

    name: str
    path: str
    asked: Any
    status: int
    body: bytes

    @property
    def streamed(self) -> bool:
        return self.body.startswith(b"data:")

    def ask(self) -> GenerateRequest:
        """The ask that leads to this request, as far as an answer is read with it."""
        asked = self.asked if isinstance(self.asked, dict) else {}
        nvext = asked.get("nvext") or {}
        ids = asked.get("token_ids") or nvext.get("token_data")
        ids = ids if isinstance(ids, list) and ids and all(type(i) is int for i in ids) else [1]
        params = asked.get("sampling_params") or asked
        logprobs = params.get("logprobs")
        named = bool(params.get("return_tokens_as_token_ids"))
        top = params.get("top_logprobs", 0) * named if logprobs is True else logprobs or 0
        # vLLM counts the sampled token among those it lists.
        top = max(top - 1, 0) if "sampling_params" in asked else top
        wanted = params.get("prompt_logprobs")
        extra = nvext.get("extra_fields") or []
        if wanted is None and "prompt_logprobs" in extra and b'"prompt_logprobs": [' in self.body:
            wanted = 0
        sampling = Sampling(
            n=1 if "nvext" in asked else min(params.get("n", 1), 8),
            logprobs=min(max(top, 0), 20),
            prompt_logprobs=wanted,
            temperature=max(params.get("temperature", 1.0), 0.0),
            stop_token_ids=tuple(params.get("stop_token_ids") or ()),
        )
        return GenerateRequest(
            prompt_ids=[i for i in ids if 0 <= i < 2**40] or [1], sampling=sampling
        )


def load(server: str, name: str) -> Capture:
    found = json.loads((WIRE / server / f"{name}.json").read_text())
    request = found["request"]
    answer = found["response"] if server == "dynamo" else found
    body = answer["body"] if server == "dynamo" else answer["response"]
    raw = body if isinstance(body, str) else json.dumps(body)
    return Capture(name, request["path"], request.get("body"), answer["status"], raw.encode())


def names(server: str, path: str) -> list[str]:
    """The captures of one route, except lists of several exchanges."""
    found = []
    for file in sorted((WIRE / server).glob("*.json")):
        content = json.loads(file.read_text())
        if isinstance(content, dict) and content["request"]["path"] == path:
            found.append(file.stem)
    return found
