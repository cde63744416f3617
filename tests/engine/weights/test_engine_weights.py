"""Weights and adapters through the async API, with callers that fail or are cancelled."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lockstep.engine import Engine
from lockstep.tokens.errors import (
    BadRequest,
    CheckpointError,
    Conflict,
    UnknownModel,
)
from tests.engine.checkpoints import reference, tensors_of
from tests.engine.rig import ids, request
from tests.engine.running import LONG, score


@pytest.mark.exact_arithmetic
@pytest.mark.failure_mode("F43")
async def test_keep_stage_score_commit_resume(engine: Engine, tiny: Path, tiny2: Path) -> None:
    """A complete update, with a request that is in flight throughout."""
    stream = engine.stream(request(ids(1, 20), max_tokens=LONG))
    pieces = [await anext(stream) for _ in range(3)]
    await engine.pause("keep")
    await engine.stage(tiny2, "v2")
    assert (engine.version, engine.staged_version) == ("v1", "v2")
    probe = ids(3, 50)
    assert await score(engine, probe, staged=True) == reference(tiny2, probe)
    assert await score(engine, probe) == reference(tiny, probe)
    assert await engine.commit() == "v2"
    await engine.resume()
    pieces += [piece async for piece in stream]
    completion = pieces[-1].completion
    assert completion is not None
    assert [span.version for span in completion.versions] == ["v1", "v2"]
    assert await engine.rollback() == "v1"
    assert await score(engine, probe) == reference(tiny, probe)


@pytest.mark.exact_arithmetic
async def test_earlier_tokens_are_continued_as_after_an_update(engine: Engine, tiny2: Path) -> None:
    """The rest of a request that was updated midway can be sampled again on its own."""
    options = {"seed": 7, "max_tokens": 40, "ignore_eos": True, "frequency_penalty": 0.5}
    stream = engine.stream(request(ids(1, 20), **options))
    pieces = [await anext(stream) for _ in range(5)]
    await engine.pause("keep")
    await engine.stage(tiny2, "v2")
    await engine.commit()
    await engine.resume()
    pieces += [piece async for piece in stream]
    updated = pieces[-1].completion
    assert updated is not None
    count = updated.versions[0].end
    assert 5 <= count < 40
    first = replace(
        updated, token_ids=updated.token_ids[:count], logprobs=updated.logprobs[:count],
        ranks=None, versions=updated.versions[:1],
    )  # fmt: skip
    (again,) = await engine.generate(replace(request(ids(1, 20), **options), earlier=first))
    assert again.token_ids == updated.token_ids
    assert again.logprobs == updated.logprobs
    assert again.versions == updated.versions
    with pytest.raises(BadRequest, match="beside earlier tokens"):
        await engine.generate(replace(request(ids(1, 20), n=2), earlier=first))
    assert await engine.rollback() == "v1"


async def test_tensors_by_name_are_staged_and_dropped_by_rollback(
    engine: Engine, tiny2: Path
) -> None:
    name = "model.norm.weight"
    await engine.stage_tensors([(name, tensors_of(tiny2)[name])], "v2")
    assert await score(engine, ids(1, 20), staged=True) != await score(engine, ids(1, 20))
    assert await engine.rollback() == "v1"
    assert engine.staged_version is None
    with pytest.raises(Conflict, match="no weights are staged"):
        await engine.commit()
    with pytest.raises(Conflict, match="no weights are staged"):
        await score(engine, [1, 2], staged=True)


@pytest.mark.failure_mode("F34")
async def test_a_failed_stage_leaves_nothing_to_commit(
    engine: Engine, tiny2: Path, tmp_path: Path
) -> None:
    probe = ids(3, 50)
    before = await score(engine, probe)
    await engine.stage(tiny2, "v2")
    with pytest.raises(CheckpointError):
        await engine.stage(tmp_path, "v3")
    with pytest.raises(Conflict, match="no weights are staged"):
        await engine.commit()
    with pytest.raises(CheckpointError):
        await engine.stage_tensors([("nonsense", torch.zeros(1))], "v3")
    assert (engine.version, await score(engine, probe)) == ("v1", before)


async def test_a_commit_completes_when_its_caller_is_cancelled(engine: Engine, tiny2: Path) -> None:
    await engine.stage(tiny2, "v2")
    task = asyncio.create_task(engine.commit())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await engine.ping()
    assert (engine.version, engine.staged_version) == ("v2", None)
    assert await engine.rollback() == "v1"


async def test_a_concurrent_change_of_weights_is_rejected(engine: Engine, tiny2: Path) -> None:
    first = asyncio.create_task(engine.stage(tiny2, "v2"))
    await asyncio.sleep(0)
    with pytest.raises(Conflict, match="another change of weights is under way"):
        await engine.stage(tiny2, "v3")
    await first
    await engine.rollback()


async def test_adapters_are_loaded_and_unloaded(engine: Engine, lora_a: Path) -> None:
    assert await engine.load_adapter("a", lora_a, "1") is False
    assert await engine.load_adapter("a", lora_a, "2") is True
    (completion,) = await engine.generate(request(ids(1, 20), adapter="a"))
    assert completion.versions[0].version == engine.version_of(engine.adapters["a"])
    assert completion.versions[0].version.startswith("v1+a@2.")
    await engine.unload_adapter("a")
    with pytest.raises(UnknownModel):
        await engine.generate(request(ids(1, 20), adapter="a"))
