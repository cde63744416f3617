"""A real vLLM server that read the right weights but computes with others is caught by a fleet."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from lockstep.backends.vllm.admin import VllmAdmin
from lockstep.checkpoint.manifest import PROBE, WEIGHTS
from lockstep.checkpoint.probe import Probe, builtin
from lockstep.fleet.fleet import Fleet
from lockstep.fleet.routing.pool import Pool
from lockstep.tokens.errors import LockstepError
from tests.engines import vllm_models as models
from tests.engines.vllm_models import VOCABULARY, Reference
from tests.engines.vllm_servers import Vllm, updated
from tests.fleet.fakes import until
from tests.fleet.weight_faults import FAULTS, Fault, stepped

pytestmark = pytest.mark.timeout(400)
SEQUENCES = builtin(VOCABULARY, 512)


def after_a_step(server: Vllm, scale: float) -> Path:
    """A checkpoint one step after the first, with a probe whose tolerance is to be measured."""
    target = server.folder / f"step-{scale}"
    if not target.exists():
        models.written(server.a, target, stepped(load_file(server.a / WEIGHTS), scale))
        old, new = (Reference(path).rows(SEQUENCES) for path in (server.a, target))
        rows = [tuple(map(tuple, logprobs)) for logprobs in (new, old)]
        Probe(SEQUENCES, rows[0], None, previous=rows[1], dtype="float32").write(target / PROBE)
    return target


@asynccontextmanager
async def fleet_of(
    server: Vllm, *, read_back: bool = True, **options: Any
) -> AsyncIterator[tuple[Fleet, VllmAdmin]]:
    """A fleet of this server, which holds the first checkpoint. Without `read_back`, it is proved
    as a server whose extension cannot read weights back."""
    async with server.admin() as admin:
        await updated(server, admin, server.a, "first")
    admin = VllmAdmin(server.url)
    await admin.detect()
    if not read_back:
        admin.read_back = cannot_read_back  # type: ignore[method-assign]
    async with (
        Pool(probe_seconds=0.5) as pool,
        Fleet(pool, **options) as fleet,
    ):
        await fleet.add(server.url, admin, worker_id="v0")
        await until(lambda: any(one.state == "serving" for one in pool.workers), 60)
        yield fleet, admin


async def cannot_read_back(**_: Any) -> None:
    return None


async def evidence(fleet: Fleet) -> Any:
    record = (await fleet.operations.latest(1))[0].workers["v0"].evidence
    assert record is not None
    return record


async def check_right(server: Vllm) -> None:
    async with fleet_of(server) as (fleet, admin):
        await fleet.update_weights(str(after_a_step(server, 0.03)), version="right")
        record = await evidence(fleet)
        print(f"right weights: {record}")
        assert (record.decided_by, record.digest, record.held) == ("held", "match", "match")
        assert record.elements >= sum(t.numel() for t in load_file(server.a / WEIGHTS).values())
        assert (await admin.contents()).dtype == "float32"


async def check_caught(server: Vllm, fault: Fault, *, read_back: bool) -> None:
    step = after_a_step(server, 0.03)
    words, decided_by, held = (
        ("it computes with other weights than it was given", "held", "mismatch")
        if read_back
        else ("its logprobs are off by", "scores", "unknown")
    )
    async with fleet_of(server, read_back=read_back) as (fleet, _):
        await server.rpc("faulty_tensors", fault=fault, old=str(server.a / WEIGHTS))
        with pytest.raises(LockstepError, match=words):
            await fleet.update_weights(str(step), version=fault.replace(" ", "-"))
        record = await evidence(fleet)
        print(f"{fault}: {record}")
        assert (record.decided_by, record.digest, record.held) == (decided_by, "match", held)
        assert fleet.desired.version == "first"


@pytest.mark.failure_mode("F48")
async def test_the_right_weights_are_proved_without_a_number(dense: Vllm) -> None:
    await check_right(dense)


@pytest.mark.failure_mode("F48")
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_server_that_computes_with_other_weights_is_caught_by_its_logprobs(
    dense: Vllm, fault: Fault
) -> None:
    await check_caught(dense, fault, read_back=False)


@pytest.mark.failure_mode("F48")
async def test_a_server_that_read_other_weights_is_caught_by_its_digest(dense: Vllm) -> None:
    step, other = after_a_step(dense, 0.03), after_a_step(dense, 0.031)
    async with fleet_of(dense) as (fleet, admin):
        stage = admin.stage

        async def elsewhere(source: Any, version: str) -> None:
            await stage(type(source)(directory=other), version)

        admin.stage = elsewhere  # type: ignore[method-assign]
        with pytest.raises(
            LockstepError, match="read contents that differ from the checkpoint, in '"
        ):
            await fleet.update_weights(str(step), version="elsewhere")
        assert (await evidence(fleet)).digest == "mismatch"


@pytest.mark.failure_mode("F49")
async def test_held_weights_may_be_required(dense: Vllm) -> None:
    step = after_a_step(dense, 0.03)
    async with fleet_of(dense, require_proof="held") as (fleet, admin):
        await fleet.update_weights(str(step), version="required")
        admin.read_back = cannot_read_back  # type: ignore[method-assign]
        with pytest.raises(LockstepError, match="--require-proof held is set"):
            await fleet.update_weights(str(after_a_step(dense, 0.031)), version="not-shown")
        assert fleet.desired.version == "required"


@pytest.mark.failure_mode("F48")
async def test_the_right_experts_are_proved_without_a_number(moe: Vllm) -> None:
    await check_right(moe)


@pytest.mark.failure_mode("F48")
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_server_that_computes_with_other_experts_is_caught(moe: Vllm, fault: Fault) -> None:
    await check_caught(moe, fault, read_back=True)
