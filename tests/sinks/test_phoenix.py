"""Traces of a real fleet in a real Arize Phoenix, read back by its API."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fleet.live_fleet import Checkpoints
from tests.processes import GENERATE, TOKEN, ServeProcess

pytestmark = pytest.mark.timeout(300)  # Phoenix takes its time to start

PHOENIX = Path(".venv-phoenix/bin/phoenix").absolute()
RUNNING = "Uvicorn running on "
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Reverse: 40213"}]
REQUEST, TURN, CALL, WORKER = (
    f"POST {CHAT}",
    "chat tiny",
    "text_completion tiny",
    f"POST {GENERATE}",
)
PHASES = ("stage", "prove", "quiesce", "commit", "resume")

Spans = list[dict[str, Any]]


@contextmanager
def phoenix(where: Path) -> Iterator[str]:
    """The URL of a Phoenix that keeps its files below the directory and reaches nothing else."""
    environ = {
        "PATH": os.environ["PATH"], "HOME": str(where), "PHOENIX_WORKING_DIR": str(where),
        "PHOENIX_HOST": "127.0.0.1", "PHOENIX_PORT": "0", "PHOENIX_GRPC_PORT": "0",
        "PHOENIX_TELEMETRY_ENABLED": "false", "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false",
        "PHOENIX_LOG_MIGRATIONS": "false",
    }  # fmt: skip
    log = where / "phoenix.log"
    with log.open("w") as output:
        process = subprocess.Popen([PHOENIX, "serve"], env=environ, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 150
        while RUNNING not in (text := log.read_text()):
            assert process.poll() is None, text[-3000:]
            assert time.monotonic() < deadline, text[-3000:]
            time.sleep(0.2)
        yield text.partition(RUNNING)[2].split()[0]
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        finally:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def sink(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with phoenix(tmp_path_factory.mktemp("phoenix")) as url:
        yield url


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("allowed")


@pytest.fixture(scope="module")
def served(sink: str, root: Path) -> Iterator[ServeProcess]:
    process = ServeProcess(
        "--trace", "--sessions", "memory", "--checkpoint-root", str(root),
        "--worker-args", "--max-model-len 512", OTEL_EXPORTER_OTLP_ENDPOINT=sink,
    )  # fmt: skip
    yield process
    process.stop()


def stored(sink: str, trace: str, *names: str) -> Spans:
    """The spans of a trace in Phoenix, from the first to start, once those of these names are."""
    query = {"trace_id": trace, "limit": "1000", "sort": "start_time", "order": "asc"}
    deadline = time.monotonic() + 60
    while True:
        answer = httpx.get(f"{sink}/v1/projects/default/spans", params=query).raise_for_status()
        spans: Spans = answer.json()["data"]
        if {span["name"] for span in spans}.issuperset(names):
            return spans
        assert time.monotonic() < deadline, [span["name"] for span in spans]
        time.sleep(0.2)


def span_id(span: dict[str, Any]) -> str:
    return str(span["context"]["span_id"])


def one(spans: Spans, name: str) -> dict[str, Any]:
    (found,) = [span for span in spans if span["name"] == name]
    return found


def chat(served: ServeProcess, session: str) -> tuple[str, str, dict[str, int]]:
    """A turn of a session: the ids of its trace and of its client's span, and its usage."""
    trace, parent = secrets.token_hex(16), secrets.token_hex(8)
    headers = {"traceparent": f"00-{trace}-{parent}-01", "x-session-id": session}
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4}
    answer = httpx.post(served.url + CHAT, json=body, headers=headers, timeout=60)
    usage: dict[str, int] = answer.raise_for_status().json()["usage"]
    return trace, parent, usage


def test_phoenix_has_a_turn_as_one_tree_with_its_model_tokens_session_and_version(
    sink: str, served: ServeProcess
) -> None:
    trace, parent, usage = chat(served, "traced")
    spans = stored(sink, trace, REQUEST, TURN, "route", CALL, "store", WORKER)
    request, turn, call, worker = (one(spans, name) for name in (REQUEST, TURN, CALL, WORKER))
    assert request["parent_id"] == parent
    assert turn["parent_id"] == span_id(request)
    for name in ("route", CALL, "store"):
        assert one(spans, name)["parent_id"] == span_id(turn)
    assert worker["parent_id"] == span_id(call)
    for span in (turn, call, worker):
        attributes = span["attributes"]
        assert attributes["gen_ai.request.model"] == "tiny"
        assert attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
        assert attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
        assert attributes["lockstep.version"] == "default"
        # Phoenix shows as a model's span what keeps to the conventions.
        assert span["span_kind"] == "LLM"
        assert attributes["llm.model_name"] == "tiny"
        assert attributes["llm.token_count.completion"] == usage["completion_tokens"]
    assert turn["attributes"]["gen_ai.operation.name"] == "chat"
    assert turn["attributes"]["lockstep.session"] == "traced"
    assert not any(span["status_code"] == "ERROR" for span in spans)
    assert "40213" not in str(spans), "what people write is in no span"


def test_phoenix_lists_the_session(sink: str, served: ServeProcess) -> None:
    trace, _, _ = chat(served, "listed")
    stored(sink, trace, TURN)
    listed = httpx.get(f"{sink}/v1/projects/default/sessions").raise_for_status().json()["data"]
    (session,) = [each for each in listed if each["session_id"] == "listed"]
    assert [each["trace_id"] for each in session["traces"]] == [trace]


def test_phoenix_has_every_phase_of_an_update_and_the_version_after_it(
    sink: str, served: ServeProcess, root: Path
) -> None:
    made = Checkpoints.make(root)
    trace = secrets.token_hex(16)
    httpx.post(
        f"{served.admin_url}/v1/rl/update_weights",
        json={"weight_dir": str(made.paths["a"]), "version": "a"},
        headers={"traceparent": f"00-{trace}-{secrets.token_hex(8)}-01",
                 "authorization": f"Bearer {TOKEN}"}, timeout=120,
    ).raise_for_status()  # fmt: skip
    update = "POST /v1/rl/update_weights"
    wanted = ["update validate", *(f"update_weights {phase}" for phase in PHASES)]
    spans = stored(sink, trace, update, *wanted)
    phases = [span for span in spans if span["parent_id"] == span_id(one(spans, update))]
    names = [span["name"] for span in phases]
    assert [name for name in names if name in wanted] == wanted
    assert not any(span["status_code"] == "ERROR" for span in spans)
    trace, _, _ = chat(served, "traced")
    turn = one(stored(sink, trace, TURN), TURN)
    assert turn["attributes"]["lockstep.version"] == "a"
