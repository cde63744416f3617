"""The sets that tokens were drawn from: in responses that request them, and in every session."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from lockstep.tokens import Sample
from lockstep.tokens.support import PackedSupport
from tests.gateway.dialects import DialectServer
from tests.processes import WorkerProcess

pytestmark = pytest.mark.failure_mode("F100")
IDS = [71, 72, 12, 85, 90]
MESSAGES = [{"role": "user", "content": "Hi"}]
GENERATE, COMPLETIONS, CHAT = "/inference/v1/generate", "/v1/completions", "/v1/chat/completions"
MORE = {"temperature": 1.0, "top_p": 0.8}
BODIES: dict[str, dict[str, Any]] = {
    GENERATE: {"token_ids": IDS, "sampling_params": {"max_tokens": 5, "seed": 1, **MORE}},
    COMPLETIONS: {"model": "tiny", "prompt": IDS, "max_tokens": 5, "seed": 1, **MORE},
    CHAT: {"model": "tiny", "messages": MESSAGES, "max_tokens": 5, "seed": 1, **MORE},
    "/v1/messages": {"model": "tiny", "messages": MESSAGES, "max_tokens": 5, **MORE},
    "/v1/responses": {"model": "tiny", "input": "Hi", "max_output_tokens": 5, **MORE},
}


@pytest.fixture
def worker(shared_worker: WorkerProcess) -> WorkerProcess:
    return shared_worker


def recorded(sample: Sample) -> list[list[int]]:
    """The sets of a sample, which are those of its sampled tokens and of no others."""
    assert sample.support is not None
    rows = np.flatnonzero(sample.support.recorded())
    assert rows.tolist() == [at for at, sampled in enumerate(sample.sampled_mask) if sampled]
    return sample.support.slice(int(rows[0]), int(rows[-1]) + 1).lists()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_session_stores_them_for_every_dialect(server: DialectServer, stream: bool) -> None:
    for path in BODIES:
        name = f"{path.strip('/').replace('/', '-')}-{stream}"
        response = await server.post(
            path, {**BODIES[path], "stream": stream}, **{"x-session-id": name}
        )
        assert response.status_code == 200, response.text
        assert 'sampling_mask":[' not in response.text, "it was not requested"
        (sample,) = await server.sessions.samples(name)
        sizes = [len(own) for own in recorded(sample)]
        assert 1 <= min(sizes) <= max(sizes) < 512
        assert not sample.support_absent
        assert Sample.from_json(sample.to_json()) == sample


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_response_has_them_on_request(server: DialectServer, stream: bool) -> None:
    for path in (GENERATE, COMPLETIONS, CHAT):
        body = {**BODIES[path], "return_sampling_mask": True}
        session = {"x-session-id": f"{path.strip('/').replace('/', '-')}-asked-{stream}"}
        if stream:
            response = await server.post(path, {**body, "stream": True}, **session)
            events = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
            chunks = [msgspec.json.decode(event) for event in events]
            masks = [choice.get("sampling_mask") for chunk in chunks for choice in chunk["choices"]]
            rows = [row for mask in masks if mask for row in mask]
        else:
            rows = (await server.ok(path, body, **session))["choices"][0]["sampling_mask"]
        (sample,) = await server.sessions.samples(session["x-session-id"])
        assert rows == recorded(sample)


async def test_grammars_are_recorded_on_request(server: DialectServer) -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": IDS, "seed": 2, "max_tokens": 8}
    body |= {"structured_outputs": {"regex": "[ab]{3}"}, "return_sampling_mask": True}
    choice = (await server.ok(COMPLETIONS, body))["choices"][0]
    for row in choice["sampling_mask"][:-1]:
        texts = [server.renderer.decode([token]) for token in row]
        assert all(set(text) <= {"a", "b"} for text in texts), texts


async def test_the_tokens_field_has_them_without_a_session(server: DialectServer) -> None:
    for path in (CHAT, "/v1/messages", "/v1/responses"):
        tokens = (await server.ok(path, BODIES[path], **{"x-lockstep-tokens": "1"}))["lockstep"]
        support = msgspec.convert(tokens["support"], PackedSupport).value()
        support.check_contains(tokens["token_ids"])
        assert tokens["shaping"]["top_p"] == 0.8
