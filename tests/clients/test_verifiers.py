"""verifiers' own command line, as eval and train client, on an environment with a tool server."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.models import bundled
from tests.clients.conftest import Clients
from tests.clients.rules import ANSWER

TRIES = 4
"""Sampled at temperature 1, the bundled models call the tool in about one rollout of three."""


def rollouts(clients: Clients, kind: str, model: str, count: int, *more: str) -> list[Any]:
    base = f"{clients.served.url}/v1"
    place = str(bundled(model))
    traces = clients.run("verifiers_eval", kind, model, place, str(count), *more, base=base)
    assert len(traces) == count
    assert [trace["errors"] for trace in traces] == [[]] * count
    return list(traces)


def replies(trace: Any) -> list[Any]:
    return [node for node in trace["nodes"] if node["message"]["role"] == "assistant"]


def whole(trace: Any) -> list[int]:
    return [token for node in trace["nodes"] for token in node["token_ids"]]


async def test_eval_client(clients: Clients) -> None:
    """It relays chat and keeps no tokens: the session that it names has them."""
    for trace in rollouts(clients, "eval", "tiny", 2):
        assert trace["rewards"]["right"]["score"] == 1.0
        assert replies(trace)[-1]["message"]["content"] == ANSWER
        await clients.exact_sample(trace["id"])


async def test_train_client(clients: Clients) -> None:
    """It renders, sends ids and bridges by itself: one branch, whose tokens are the session's."""
    for trace in rollouts(clients, "train", "tiny", 2):
        assert trace["rewards"]["right"]["score"] == 1.0
        assert len(replies(trace)) == 3
        sample = await clients.exact_sample(trace["id"])
        assert sample.token_ids == whole(trace)


@pytest.mark.timeout(480)
@pytest.mark.parametrize("model", ["tiny", "tiny-moe"])
async def test_train_client_on_the_embedded_engine(
    model: str, request: pytest.FixtureRequest
) -> None:
    """Dense and mixture of experts, which sends back the experts of every token."""
    embedded: Clients = request.getfixturevalue({"tiny": "dense", "tiny-moe": "moe"}[model])
    question = ("--env.taskset.question", "What is 417 + 86?")
    traces: list[Any] = []
    for _ in range(TRIES):
        traces += rollouts(embedded, "train", model, 6, *question)
        if any(len(replies(trace)) > 1 for trace in traces):
            break
    else:
        raise AssertionError(f"none of {len(traces)} rollouts called the tool")
    for trace in traces:
        sample = await embedded.exact_sample(trace["id"], turns=len(replies(trace)))
        assert sample.token_ids == whole(trace)
        assert (sample.experts is not None) == (model == "tiny-moe")
        for node in replies(trace) if model == "tiny-moe" else ():
            assert node["routed_experts"] is not None
