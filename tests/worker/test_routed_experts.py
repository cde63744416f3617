"""`--return-routed-experts`: every response includes them, from the row that a request names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lockstep.engine import Engine, EngineOptions
from lockstep.models import bundled
from lockstep.tokens.errors import BadRequest
from lockstep.worker.data import DataPlane
from tests.processes import WorkerProcess

PROMPT = [11, 29, 3, 77, 5, 140, 9]


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    process = WorkerProcess("--return-routed-experts", model="tiny-moe")
    yield process
    process.stop()


async def test_every_response_includes_experts(worker: WorkerProcess) -> None:
    options = {"max_tokens": 5, "seed": 1, "ignore_eos": True}
    _, body = await worker.generate(PROMPT, **options)
    assert body["choices"][0]["routed_experts"]["shape"] == [len(PROMPT) + 4, 2, 2]
    events = await worker.events(PROMPT, **options)
    shapes = [
        choice["routed_experts"]["shape"]
        for event in events
        for choice in event["choices"]
        if choice.get("routed_experts")
    ]
    assert shapes == [[len(PROMPT) + 4, 2, 2]]


async def test_rows_that_a_client_already_has_are_left_out(worker: WorkerProcess) -> None:
    options = {"max_tokens": 5, "seed": 1, "ignore_eos": True}
    _, body = await worker.generate(PROMPT, **options, routed_experts_prompt_start=4)
    experts = body["choices"][0]["routed_experts"]
    assert (experts["start"], experts["shape"][0]) == (4, len(PROMPT))


def test_a_model_without_experts_rejects_the_option_at_start() -> None:
    directory = bundled("tiny")
    assert directory is not None
    engine = Engine("tiny", EngineOptions(max_seqs=1, max_model_len=64))
    with pytest.raises(BadRequest, match="not a mixture of experts"):
        DataPlane(engine, "tiny", directory, return_routed_experts=True)
