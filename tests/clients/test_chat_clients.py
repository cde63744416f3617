"""Stock clients of the chat API hold a tool conversation that becomes one exact sample."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.clients.conftest import PYTHON, Clients
from tests.clients.rules import ANSWER


@pytest.mark.parametrize("python", [PYTHON, Path(sys.executable)], ids=["openai2", "openai3"])
@pytest.mark.parametrize("how", ["whole", "stream"])
async def test_openai_sdk(clients: Clients, session: str, python: Path, how: str) -> None:
    result = clients.run("openai_sdk", how, base=clients.session(session), python=python)
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
        "smolagents_agent",
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
