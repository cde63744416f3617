"""Weight updates of a real vLLM server whose head is tied to its embedding."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from safetensors.torch import load_file

from lockstep.backends.admin import Broadcaster, Source, TensorSpec
from lockstep.engine.weights.broadcast import Broadcast
from lockstep.engine.weights.shared_memory import shared_tensors
from lockstep.http.server import listen
from lockstep.tokens.errors import CheckpointError, Conflict, EngineFailure
from tests.engines import vllm_models as models
from tests.engines.vllm_load import furthest_off, under_load
from tests.engines.vllm_models import TOLERANCE, Reference, furthest
from tests.engines.vllm_servers import Vllm, probe_off, updated

pytestmark = pytest.mark.timeout(400)
SKIP = "LOCKSTEP_VLLM_SKIP_REPAIRS"


async def test_weights_go_there_and_back_under_load(dense: Vllm) -> None:
    async with dense.admin() as admin:
        began = (await admin.view()).version
        assert began is not None
        async with under_load(dense) as done:
            offs = []
            for path, version in (
                (dense.b, "B1"),
                (dense.a, "A1"),
                (dense.b, "B2"),
                (dense.a, "A2"),
            ):
                await asyncio.sleep(0.5)
                offs.append(await updated(dense, admin, path, version))
                view = await admin.view()
                assert (view.version, view.staged, view.paused) == (version, None, False)
            await asyncio.sleep(0.5)
        assert max(offs) <= TOLERANCE
        assert await probe_off(dense, admin, dense.a) <= TOLERANCE  # through the scheduler as well
    weights = {began: dense.a, "B1": dense.b, "A1": dense.a, "B2": dense.b, "A2": dense.a}
    off = furthest_off(done, weights)
    mixed = sum(len(each.versions) > 1 for each in done)
    print(f"parity of steps {offs}; {len(done)} requests, {mixed} across an update, off {off}")
    assert off <= TOLERANCE
    assert mixed


@pytest.mark.failure_mode("F28")
async def test_the_probe_catches_a_tied_head_that_was_not_repacked(dense: Vllm) -> None:
    async with dense.admin() as admin:
        await dense.rpc("faulty_environ", name=SKIP, value="tied_head")
        try:
            off = await updated(dense, admin, dense.b, "stale-head")
        finally:
            await dense.rpc("faulty_environ", name=SKIP, value="")
        print(f"without the repair: off by {off}")
        assert off > 0.01
        assert await updated(dense, admin, dense.a, "mended") <= TOLERANCE


async def test_a_rollback_brings_back_the_weights_from_memory(dense: Vllm) -> None:
    async with dense.admin() as admin:
        assert await updated(dense, admin, dense.a, "before") <= TOLERANCE
        assert await updated(dense, admin, dense.b, "after") <= TOLERANCE
        await admin.pause("keep")
        assert await admin.rollback() == "before"
        assert await probe_off(dense, admin, dense.a) <= TOLERANCE
        await admin.resume()
        # Nobody paused it: it is paused for the time of the swap.
        await admin.stage(Source(directory=dense.b), "unpaused")
        await admin.commit("unpaused")
        assert await probe_off(dense, admin, dense.b) <= TOLERANCE
        assert await admin.rollback() == "before"
        assert await probe_off(dense, admin, dense.a) <= TOLERANCE
        await admin.stage(Source(directory=dense.b), "never")
        assert (await admin.view()).staged == "never"
        assert await admin.rollback() == "before"
        assert (await admin.view()).staged is None


@pytest.mark.parametrize("after", [0, 3, 12])
async def test_a_load_that_fails_leaves_the_old_weights(dense: Vllm, after: int) -> None:
    async with dense.admin() as admin:
        assert await updated(dense, admin, dense.a, f"good-{after}") <= TOLERANCE
        await admin.stage(Source(directory=dense.b), "bad")
        await admin.pause("keep")
        await dense.rpc("faulty_load", after=after)
        with pytest.raises(EngineFailure, match="old weights were put back: OSError: the disk"):
            await admin.commit("bad")
        assert await probe_off(dense, admin, dense.a) <= TOLERANCE
        assert (await admin.view()).version == f"good-{after}"
        await admin.resume()
        assert await probe_off(dense, admin, dense.a) <= TOLERANCE
        assert await admin.rollback() == f"good-{after}"  # what is staged still was


async def test_a_part_of_a_fused_module_is_refused_or_completed(dense: Vllm) -> None:
    query = "model.layers.0.self_attn.q_proj.weight"
    mixed = models.random(dense.a, dense.room / "query", seed=7, only=query)
    tensors = {query: load_file(mixed / "model.safetensors")[query]}
    async with dense.admin() as admin:
        assert await updated(dense, admin, dense.a, "whole") <= TOLERANCE
        with shared_tensors(tensors) as (name, specs):
            source = Source(shared=name, tensors=specs)
            with pytest.raises(CheckpointError, match="send all tensors"):
                await admin.stage(source, "half")
            assert (await admin.view()).staged is None
            await admin.stage(Source(shared=name, tensors=specs, partial=True), "part")
        await admin.pause("keep")
        await admin.commit("part")
        probe = dense.probes[dense.a]
        right = Reference(mixed).rows(probe.sequences)
        assert furthest(await admin.probe(probe.sequences), right) <= TOLERANCE
        await admin.resume()
        assert await updated(dense, admin, dense.a, "whole-again") <= TOLERANCE


async def test_bad_checkpoints_are_refused_while_staging(dense: Vllm) -> None:
    tensors = load_file(dense.b / "model.safetensors")
    norm = "model.norm.weight"
    cases = {
        "lacks": ({k: v for k, v in tensors.items() if k != norm}, "send all tensors"),
        "more": ({**tensors, "other.weight": tensors[norm].clone()}, "which the served model has not"),
        "shape": ({**tensors, norm: tensors[norm][:-1].clone()}, "expected torch.float32"),
        "nan": ({**tensors, norm: tensors[norm] * float("nan")}, "not finite"),
    }
    async with dense.admin() as admin:
        served = (await admin.view()).version
        for name, (broken, words) in cases.items():
            path = models.written(dense.b, dense.room / name, broken)
            with pytest.raises(CheckpointError, match=words):
                await admin.stage(Source(directory=path), name)
        with pytest.raises(CheckpointError, match="cannot be read"):
            await admin.stage(Source(directory=dense.room / "nowhere"), "nowhere")
        view = await admin.view()
        assert (view.version, view.staged) == (served, None)
        with pytest.raises(Conflict, match="commit of 'nothing' was requested"):
            await admin.commit("nothing")
        assert (await admin.view()).paused is False


async def test_the_standard_routes_of_vllm_work_and_cannot_kill_the_server(dense: Vllm) -> None:
    async with dense.admin() as admin:
        assert await updated(dense, admin, dense.a, "standard-a") <= TOLERANCE
        assert (await dense.post("/init_weight_transfer_engine", {"init_info": {}}))[0] == 200
        # Nobody paused it: with vLLM's own backends the next forward pass would be the last.
        async with under_load(dense) as done:
            assert (await dense.post("/start_weight_update"))[0] == 200
            bad = {"update_info": {"model_path": str(dense.room / "nowhere")}}
            status, body = await dense.post("/update_weights", bad)
            assert (status, "cannot be read" in body["error"]["message"]) == (500, True)
            await asyncio.sleep(0.3)
        assert furthest_off(done, {"standard-a": dense.a}) <= TOLERANCE
        await admin.pause("keep")
        good = {"update_info": {"model_path": str(dense.b), "weight_version": "standard-b"}}
        assert (await dense.post("/start_weight_update"))[0] == 200
        assert (await dense.post("/update_weights", good))[0] == 200
        label = {"weight_version": "standard-b"}
        assert (await dense.post("/finish_weight_update", label))[0] == 200
        assert await probe_off(dense, admin, dense.b) <= TOLERANCE
        assert (await admin.view()).version == "standard-b"
        assert await admin.rollback() == "standard-a"
        await admin.resume()
        assert await probe_off(dense, admin, dense.a) <= TOLERANCE


async def test_weights_come_over_a_broadcast_group(dense: Vllm) -> None:
    tensors = load_file(dense.b / "model.safetensors")
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
    how = Broadcaster("127.0.0.1", port, rank=1, world_size=2, seconds=60.0)
    join = partial(Broadcast.join, how.host, how.port, 0, 2, seconds=60.0)
    async with dense.admin() as admin:
        trainer, _ = await asyncio.gather(asyncio.to_thread(join), admin.join_group(how))
        specs = [TensorSpec(name, "float32", tuple(t.shape)) for name, t in tensors.items()]
        await asyncio.gather(
            admin.stage(Source(group=how.group, tensors=specs), "sent"),
            asyncio.to_thread(trainer.send, tensors.values()),
        )
        await admin.commit("sent")
        assert await probe_off(dense, admin, dense.b) <= TOLERANCE
        assert await updated(dense, admin, dense.a, "after-sent") <= TOLERANCE
