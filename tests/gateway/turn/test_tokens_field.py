"""X-Lockstep-Tokens: the tokens of a turn beside its message, in every dialect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.dialects import DialectServer, scripted_worker
from tests.processes import WorkerProcess

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40},
    "/v1/responses": {"input": "Hi"},
}
PLEASE = {"x-lockstep-tokens": "1"}


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    with scripted_worker(tmp_path_factory.mktemp("script"), [{"say": "Hello."}]) as process:
        yield process


@pytest.mark.parametrize("path", BODIES)
async def test_the_tokens_header_adds_tokens_to_a_response(
    server: DialectServer, path: str
) -> None:
    body = {"model": "tiny", **BODIES[path]}
    session = {"x-session-id": path.strip("/").replace("/", "-")}
    tokens = (await server.ok(path, body, **session, **PLEASE))["lockstep"]
    assert server.renderer.decode(tokens["token_ids"]) == "Hello.<|im_end|>"
    assert server.renderer.decode(tokens["prompt_ids"]).endswith("<|im_start|>assistant\n")
    assert len(tokens["logprobs"]) == len(tokens["token_ids"])
    assert [span[1:] for span in tokens["versions"]] == [[0, len(tokens["token_ids"])]]
    assert (tokens["bridged"], tokens["cause"]) == (False, None)
    assert "lockstep" not in await server.ok(path, body)


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_that_is_to_bring_tokens_is_refused(
    server: DialectServer, path: str
) -> None:
    body = {"model": "tiny", "stream": True, **BODIES[path]}
    refused = await server.post(path, body, **PLEASE)
    assert refused.status_code == 400
    assert "stream: false" in refused.text
