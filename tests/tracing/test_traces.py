"""Traces of a real gateway and a real worker, as a real collector gets them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.fleet.live_fleet import Checkpoints
from tests.processes import GENERATE, TOKEN, ServeProcess
from tests.tracing.collector import Collector, ReceivedSpan, collecting

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Reverse: 40213"}]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("allowed")


@pytest.fixture(scope="module")
def served(collector: Collector, root: Path) -> Iterator[ServeProcess]:
    process = ServeProcess(
        "--trace", "--sessions", "memory", "--checkpoint-root", str(root),
        "--worker-args", "--max-model-len 512",
        OTEL_EXPORTER_OTLP_ENDPOINT=collector.url, OTEL_BSP_SCHEDULE_DELAY="50",
    )  # fmt: skip
    yield process
    assert process.stop() == 0


async def post(url: str, body: Any, **headers: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session:
        async with session.post(url, json=body, headers=headers) as response:
            return response.status, await response.text()


def traceparent() -> tuple[str, str, str]:
    """The header of a client that traces, with its ids of trace and span."""
    trace, span = secrets.token_hex(16), secrets.token_hex(8)
    return f"00-{trace}-{span}-01", trace, span


def of_trace(collector: Collector, trace: str, services: int = 2) -> dict[str, ReceivedSpan]:
    """The spans of one trace by name, once both servers have sent that of their request."""

    def enough(spans: list[ReceivedSpan]) -> bool:
        mine = [span for span in spans if span.trace == trace]
        return sum(span.kind == "server" and "POST" in span.name for span in mine) >= services

    # The model cards are read again now and then.
    spans = [span for span in collector.wait(enough)
             if span.trace == trace and span.name != "GET /v1/models"]  # fmt: skip
    names = [f"{span.service}: {span.name}" for span in spans]
    assert len(names) == len(set(names)), names
    return dict(zip(names, spans, strict=True))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_turn_through_gateway_and_worker_is_one_tree(
    served: ServeProcess, collector: Collector, stream: bool
) -> None:
    header, trace, client_span = traceparent()
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 8, "temperature": 0.5,
            "stream": stream}  # fmt: skip
    status, _ = await post(
        served.url + CHAT, body, traceparent=header, **{"x-session-id": f"traced-{stream}"}
    )
    assert status == 200
    spans = of_trace(collector, trace)
    request = spans[f"lockstep-gateway: POST {CHAT}"]
    turn = spans["lockstep-gateway: chat tiny"]
    route = spans["lockstep-gateway: route"]
    call = spans["lockstep-gateway: text_completion tiny"]
    store = spans["lockstep-gateway: store"]
    worker = spans[f"lockstep-worker: POST {GENERATE}"]
    assert len(spans) == 6
    assert request.parent == client_span
    assert turn.parent == request.id
    assert [route.parent, call.parent, store.parent] == [turn.id] * 3
    assert worker.parent == call.id
    assert [request.kind, call.kind, worker.kind] == ["server", "client", "server"]
    assert request.start <= turn.start <= route.start <= call.start <= worker.start
    assert worker.end <= store.end <= turn.end <= request.end
    assert not any(span.error for span in spans.values())


async def test_spans_have_the_attributes_of_the_conventions(
    served: ServeProcess, collector: Collector
) -> None:
    header, trace, _ = traceparent()
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4, "temperature": 0.5}
    await post(f"{served.url}/sessions/named/v1/chat/completions", body, traceparent=header)
    spans = of_trace(collector, trace)
    request = spans["lockstep-gateway: POST /sessions/{session}/v1/chat/completions"].attributes
    assert request["http.request.method"] == "POST"
    assert request["http.response.status_code"] == 200
    assert request["lockstep.session"] == "named"
    call = spans["lockstep-gateway: text_completion tiny"].attributes
    turn = spans["lockstep-gateway: chat tiny"].attributes
    worker = spans[f"lockstep-worker: POST {GENERATE}"].attributes
    for attributes in (call, turn, worker):
        assert attributes["gen_ai.request.model"] == "tiny"
        assert attributes["gen_ai.usage.input_tokens"] > 4
        assert 1 <= attributes["gen_ai.usage.output_tokens"] <= 4
        assert attributes["gen_ai.response.finish_reasons"] in (["stop"], ["length"])
        assert attributes["lockstep.version"] == "default"
    assert turn["gen_ai.operation.name"] == "chat"
    assert turn["lockstep.session"] == "named"
    assert call["gen_ai.operation.name"] == "text_completion"
    assert call["gen_ai.request.temperature"] == 0.5
    assert call["gen_ai.request.max_tokens"] == 4
    everything = "".join(map(str, [span.attributes for span in spans.values()]))
    assert "40213" not in everything, "what people write is in no span"


async def test_relayed_tokens_are_traced_as_well(
    served: ServeProcess, collector: Collector
) -> None:
    for stream in (False, True):
        header, trace, _ = traceparent()
        body = {"token_ids": [5, 6, 7], "stream": stream,
                "sampling_params": {"max_tokens": 3, "ignore_eos": True, "logprobs": 0},
                }  # fmt: skip
        assert (await post(served.url + GENERATE, body, traceparent=header))[0] == 200

        def mine(spans: list[ReceivedSpan], trace: str = trace) -> list[ReceivedSpan]:
            return [span for span in spans if span.trace == trace]

        spans = mine(collector.wait(lambda spans: len(mine(spans)) >= 5))
        (call,) = [span for span in spans if span.kind == "client"]
        (turn,) = [span for span in spans if span.id == call.parent]
        for span in (call, turn):
            assert span.name == "text_completion tiny"
            assert span.attributes["gen_ai.usage.output_tokens"] == 3


async def test_errors_have_a_status(served: ServeProcess, collector: Collector) -> None:
    header, trace, _ = traceparent()
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4, "min_weight_version": "later",
            "weight_version": "another"}  # fmt: skip
    status, text = await post(served.url + CHAT, body, traceparent=header)
    assert status >= 400, text
    spans = of_trace(collector, trace)
    request = spans[f"lockstep-gateway: POST {CHAT}"]
    assert request.attributes["http.response.status_code"] == status
    turn = spans["lockstep-gateway: chat tiny"]
    call = spans["lockstep-gateway: text_completion tiny"]
    for span in (turn, call):
        assert span.error
        assert span.attributes["error.type"]


async def test_what_no_route_takes_has_the_name_of_its_method_only(
    served: ServeProcess, collector: Collector
) -> None:
    header, trace, _ = traceparent()
    assert (await post(f"{served.url}/no/such/route-123", {}, traceparent=header))[0] == 404
    (name,) = of_trace(collector, trace, services=1)
    assert name == "lockstep-gateway: POST"


async def test_every_phase_of_an_update_has_its_span(
    served: ServeProcess, collector: Collector, root: Path
) -> None:
    made = Checkpoints.make(root)
    header, trace, _ = traceparent()
    body = {"weight_dir": str(made.paths["a"]), "version": "a"}
    status, text = await post(
        f"{served.admin_url}/v1/rl/update_weights", body,
        traceparent=header, authorization=f"Bearer {TOKEN}",
    )  # fmt: skip
    assert status == 200, text

    def mine(spans: list[ReceivedSpan]) -> list[ReceivedSpan]:
        return [span for span in spans if span.trace == trace]

    def done(spans: list[ReceivedSpan]) -> bool:
        return any(span.name == "POST /v1/rl/update_weights" for span in mine(spans))

    spans = mine(collector.wait(done))
    gateway = sorted((span for span in spans if span.service == "lockstep-gateway"),
                     key=lambda span: span.start)  # fmt: skip
    names = [span.name for span in gateway]
    assert names[0] == "POST /v1/rl/update_weights"
    phases = [name.removeprefix("update_weights ") for name in names[1:]]
    wanted = ["update validate", "stage", "quiesce", "commit", "resume"]
    assert [phase for phase in phases if phase in wanted] == wanted, phases
    assert any("prove" in phase for phase in phases), phases
    assert {span.parent for span in gateway[1:]} == {gateway[0].id}
    # What the worker did in a phase is below it.
    (stage,) = [span for span in gateway if span.name == "update_weights stage"]

    def below(spans: list[ReceivedSpan]) -> list[ReceivedSpan]:
        return [span for span in mine(spans) if span.parent == stage.id]

    staged = below(collector.wait(below))
    assert "/engine/stage" in {span.attributes["url.path"] for span in staged}
    assert {span.service for span in staged} == {"lockstep-worker"}


async def test_polled_routes_leave_no_spans(served: ServeProcess, collector: Collector) -> None:
    async with aiohttp.ClientSession() as session, session.get(f"{served.url}/health") as response:
        assert response.status == 200
    header, trace, _ = traceparent()
    await post(served.url + CHAT, {"messages": MESSAGES, "max_tokens": 1}, traceparent=header)
    of_trace(collector, trace)
    assert not [
        span for span in collector.spans if "/health" in span.attributes.get("url.path", "")
    ]
