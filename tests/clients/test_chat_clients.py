"""Stock clients of the chat API hold a tool conversation that becomes one exact sample."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.clients.conftest import PYTHON, Clients
from tests.clients.rules import ANSWER


@pytest.mark.parametrize("python", [PYTHON, Path(sys.executable)], ids=["openai2", "openai3"])
@pytest.mark.parametrize("how", ["whole", "stream"])
async def test_openai_sdk(clients: Clients, session: str, python: Path, how: str) -> None:
    result = clients.run("openai_sdk", how, base=clients.session(session), interpreter=python)
    assert result["answer"] == ANSWER
    await clients.exact_sample(session)


@pytest.mark.parametrize("how", ["whole", "stream"])
@pytest.mark.parametrize(
    "program",
    [
        "litellm_loop",
        "langchain_agent",
        "pydantic_ai_agent",
        "openai_agents",
        "ag2_agent",
    ],
)
async def test_agent_framework(clients: Clients, session: str, program: str, how: str) -> None:
    result = clients.run(program, how, base=clients.session(session))
    assert result["answer"] == ANSWER
    await clients.exact_sample(session)


async def test_mini_swe_agent(clients: Clients, session: str) -> None:
    result = clients.run("mini_swe_agent", base=clients.session(session))
    assert result == {"status": "Submitted", "answer": "1509"}
    await clients.exact_sample(session)


async def test_dspy(clients: Clients, session: str) -> None:
    """Every step of dspy's ReAct is a conversation of its own: a sample each, all exact."""
    result = clients.run("dspy_react", base=clients.session(session))
    assert result["answer"] == ANSWER
    samples = await clients.samples(session)
    assert len(samples) == 4
    for sample in samples:
        await clients.check_exact(sample)


@pytest.mark.parametrize(
    "mode", ["TOOLS", "TOOLS_STRICT", "FUNCTIONS", "PARALLEL_TOOLS", "JSON", "JSON_SCHEMA"]
)
async def test_instructor(clients: Clients, session: str, mode: str) -> None:
    result = clients.run("instructor_modes", mode, base=clients.session(session))
    assert result["countries"] == ["France", "Japan", "Peru"]
    await clients.exact_sample(session)


async def test_instructor_on_the_responses_api(clients: Clients, session: str) -> None:
    result = clients.run("instructor_modes", "RESPONSES_TOOLS", base=clients.session(session))
    assert result["countries"] == ["France", "Japan", "Peru"]
    samples = await clients.samples(session)
    assert len(samples) == 3
    for sample in samples:
        await clients.check_exact(sample)


async def test_instructor_with_blocks_of_json(clients: Clients, session: str) -> None:
    """It asks for the block in the newest message only, so that every turn forks, and says so."""
    result = clients.run("instructor_modes", "MD_JSON", base=clients.session(session))
    assert result["countries"] == ["France", "Japan", "Peru"]
    await clients.exact_forks(session, 3)


@pytest.mark.parametrize("how", ["whole", "stream"])
async def test_smolagents(clients: Clients, session: str, how: str) -> None:
    """It writes its calls into the history as text of its own, so that every turn forks."""
    result = clients.run("smolagents_agent", how, base=clients.session(session))
    assert result["answer"] == ANSWER
    await clients.exact_forks(session, 3)


async def test_forced_calls_and_schemas_on_the_embedded_engine(
    dense: Clients, session: str
) -> None:
    """A small model does what is demanded, and its processed logprobs are scored again exactly."""
    result = dense.run("openai_forced", base=dense.session(session))
    assert result["finishes"][:3] == ["tool_calls", "tool_calls", "stop"]
    assert json.loads(result["contents"][2])["answer"] in (503, 1509)
    assert not set("503") & set(result["contents"][3])
    sample = await dense.exact_sample(session, turns=4)
    assert len(sample.shaping) == 4


def test_a_prompt_that_is_too_long_is_recognised(dense: Clients) -> None:
    assert dense.run("overlong", base=f"{dense.served.url}/v1") == {
        "openai": "context_length_exceeded",
        "litellm": "ContextWindowExceededError",
        "langchain": "ContextOverflowError",
    }
