"""Weight updates of a real SGLang server: right ones are proved, and every wrong one is caught."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from safetensors.torch import load_file

from lockstep.backends.admin import Source
from lockstep.checkpoint.delta.convert import make_delta, write_full
from lockstep.checkpoint.validate import Checkpoint
from lockstep.tokens import Completion
from lockstep.tokens.errors import CheckpointError, Conflict, LockstepError
from tests.engines import vllm_models as models
from tests.engines.sglang_servers import Sglang, probe_off, updated
from tests.engines.test_sglang_transport import request_of
from tests.engines.vllm_models import TOLERANCE, WEIGHTS, Reference

pytestmark = pytest.mark.timeout(400)
NORM = "model.layers.0.post_attention_layernorm.weight"


def off_by_span(completion: Completion, weights: dict[str, Path]) -> dict[str, float]:
    """The largest distance to each version's own logprobs, over the tokens it claims."""
    prompt = len(completion.prompt_ids)
    worst = {}
    for span in completion.versions:
        right = Reference(weights[span.version]).score(
            [*completion.prompt_ids, *completion.token_ids]
        )
        worst[span.version] = max(
            abs(completion.logprobs[at] - right[prompt - 1 + at])
            for at in range(span.start, span.end)
        )
    return worst


async def test_weights_go_there_and_back_and_are_held(sglang: Sglang) -> None:
    async with sglang.admin() as admin:
        for path, version in ((sglang.b, "B1"), (sglang.a, "A1"), (sglang.b, "B2")):
            assert await updated(admin, path, version) <= TOLERANCE
            view = await admin.view()
            assert (view.version, view.staged, view.paused) == (version, None, False)
            contents, report = await admin.contents(), await admin.read_back()
            assert contents.digest == Checkpoint.validate(path, roots=(path,)).digest
            assert contents.dtype == "float32"
            assert report is not None
            assert report.is_complete
            assert report.elements == sum(
                tensor.numel() for tensor in load_file(path / WEIGHTS).values()
            )
        await admin.pause("wait")
        assert await admin.rollback() == "A1"
        await admin.resume()
        assert await probe_off(admin, sglang.a) <= TOLERANCE


@pytest.mark.failure_mode("F43")
@pytest.mark.failure_mode("F69")
async def test_tokens_after_an_update_in_mid_request_are_of_the_new_weights(
    sglang: Sglang,
) -> None:
    async with sglang.admin() as admin, sglang.transport() as transport:
        await updated(admin, sglang.a, "before")
        running = asyncio.create_task(transport.generate(request_of(max_tokens=1200)))
        await asyncio.sleep(0.7)
        await admin.stage(Source(directory=sglang.b), "after")
        await admin.pause("keep")
        await admin.commit("after")
        await admin.resume()
        (completion,) = await running
    assert [span.version for span in completion.versions] == ["before", "after"]
    worst = off_by_span(completion, {"before": sglang.a, "after": sglang.b})
    assert max(worst.values()) <= TOLERANCE, worst


@pytest.mark.failure_mode("F69")
async def test_stale_kv_after_a_forced_in_place_pause_is_caught_and_flushed(
    sglang: Sglang,
) -> None:
    prompt = list(range(20, 180))
    async with sglang.admin() as admin, sglang.transport() as transport:
        assert await updated(admin, sglang.a, "old") <= TOLERANCE
        running = asyncio.create_task(transport.generate(request_of(prompt, max_tokens=1500)))
        await asyncio.sleep(0.7)
        # What a client without Lockstep does: the label and the weights are new, the KV is not.
        assert (await sglang.post("/pause_generation", {"mode": "in_place"}))[0] == 200
        body = {"model_path": str(sglang.b), "weight_version": "stale"}
        status, reply = await sglang.post("/update_weights_from_disk", body)
        assert (status, reply["success"]) == (400, False)
        assert (await sglang.post("/continue_generation", {}))[0] == 200
        (mixed,) = await running
        assert [span.version for span in mixed.versions] == ["old", "stale"]
        stale = off_by_span(mixed, {"old": sglang.a, "stale": sglang.b})["stale"]
        (reused,) = await transport.generate(request_of(prompt, max_tokens=4))
        reuse = off_by_span(reused, {"stale": sglang.b})["stale"]
        print(f"in place: off by {stale:.3g}; a new request on the cached prefix: {reuse:.3g}")
        assert stale > 0.01
        # Weights and label are right now, and the next update's flush ends the stale prefixes.
        assert await updated(admin, sglang.b, "fresh") <= TOLERANCE
        (clean,) = await transport.generate(request_of(prompt, max_tokens=4))
        assert off_by_span(clean, {"fresh": sglang.b})["fresh"] <= TOLERANCE


async def test_a_driver_refuses_to_load_into_a_running_server(sglang: Sglang) -> None:
    async with sglang.admin() as admin:
        await admin.stage(Source(directory=sglang.a), "unpaused")
        with pytest.raises(Conflict, match="is not paused"):
            await admin.commit("unpaused")


def broken(sglang: Sglang, folder: Path, kind: str) -> Path:
    """Checkpoint `b` with a fault that SGLang reports as a success."""
    tensors = load_file(sglang.b / WEIGHTS)
    if kind == "missing":
        del tensors[NORM]
    else:
        name = "model.layers.1.mlp.down_proj.weight"
        tensors[name] = tensors[name][:, :-64].contiguous()
    return models.written(sglang.b, folder / kind, tensors)


@pytest.mark.failure_mode("F28")
@pytest.mark.failure_mode("F34")
@pytest.mark.parametrize("kind", ["missing", "shape"])
async def test_a_broken_checkpoint_that_the_server_calls_a_success_is_rolled_back(
    sglang: Sglang, tmp_path: Path, kind: str
) -> None:
    path = broken(sglang, tmp_path, kind)
    async with sglang.admin() as admin:
        await updated(admin, sglang.a, f"good-{kind}")
    async with sglang.fleet() as fleet:
        await fleet.update_weights(str(sglang.a), version=f"agreed-{kind}")
        # Validation refuses it, and changes nothing.
        with pytest.raises(LockstepError):
            await fleet.update_weights(str(path), version="refused")
        # Without validation the server loads it, says success, and the proof refuses it.
        with pytest.raises(LockstepError) as caught:
            await fleet.update_weights(source=Source(directory=path), version="unvalidated")
        print(caught.value.message)
        (worker,) = fleet.workers
        assert (worker.state, worker.version) == ("serving", f"agreed-{kind}")
        (completion,) = await worker.generate(request_of())
        assert {span.version for span in completion.versions} == {f"agreed-{kind}"}
    async with sglang.admin() as admin:
        assert await probe_off(admin, sglang.a) <= TOLERANCE


@pytest.mark.failure_mode("F28")
async def test_a_label_without_its_weights_is_not_believed(sglang: Sglang) -> None:
    async with sglang.fleet() as fleet:
        await fleet.update_weights(str(sglang.a), version="labelled-1")
        await fleet.update_weights(str(sglang.b), version="labelled-2")
        # Old weights under the agreed label, as after a restart and a careless script.
        body = {"model_path": str(sglang.a), "weight_version": "other"}
        assert (await sglang.post("/update_weights_from_disk", body))[0] == 200
        relabel = {"new_version": "labelled-2"}
        assert (await sglang.post("/update_weight_version", relabel))[0] == 200
        (worker,) = fleet.workers
        fleet.pool.eject("w0", "checked again")
        await fleet.pool.wait_ready(1, 60)
        assert worker.version == "labelled-2"
        (completion,) = await worker.generate(request_of(prompt_logprobs=0, temperature=1.0))
        worst = off_by_span(completion, {"labelled-2": sglang.b})
        assert worst["labelled-2"] <= TOLERANCE


async def test_deltas_are_assembled_and_loaded_also_by_a_server_that_joins(
    sglang: Sglang, tmp_path: Path
) -> None:
    base, full = tmp_path / "step-1", tmp_path / "full"
    models.random(sglang.a, tmp_path / "random", seed=45)
    write_full(tmp_path / "random", base)
    models.random(base, full, seed=46, only="layers.0.self_attn.q_proj")
    make_delta(full, base, tmp_path / "step-2")
    async with sglang.fleet() as fleet:
        await fleet.update_weights(str(base), version="delta-1")
        operation = await fleet.update_weights(str(tmp_path / "step-2"), version="delta-2")
        assert operation.workers["w0"].evidence is not None
        assert operation.workers["w0"].evidence.held == "match"
        (worker,) = fleet.workers
        (completion,) = await worker.generate(request_of())
        assert off_by_span(completion, {"delta-2": full})["delta-2"] <= TOLERANCE
        # A server with other weights is brought to the delta before it serves.
        async with sglang.admin() as admin:
            await updated(admin, sglang.b, "elsewhere")
        fleet.pool.eject("w0", "it was away")
        await fleet.pool.wait_ready(1, 60)
        (completion,) = await worker.generate(request_of())
        assert off_by_span(completion, {"delta-2": full})["delta-2"] <= TOLERANCE
    async with sglang.admin() as admin:
        assert await updated(admin, sglang.a, "whole") <= TOLERANCE


@pytest.mark.failure_mode("F68")
async def test_a_checkpoint_that_is_truncated_after_validation_is_not_sent(
    sglang: Sglang, tmp_path: Path
) -> None:
    path = models.random(sglang.a, tmp_path / "cut", seed=48)
    async with sglang.admin() as admin:
        await updated(admin, sglang.a, "whole-1")
        await admin.stage(Source(directory=path), "cut")
        await admin.pause("keep")
        os.truncate(path / WEIGHTS, (path / WEIGHTS).stat().st_size // 2)
        with pytest.raises(CheckpointError, match="the file is cut"):
            await admin.commit("cut")
        assert await admin.rollback() == "whole-1"
        await admin.resume()
        assert await probe_off(admin, sglang.a) <= TOLERANCE


async def test_a_failed_load_is_reported_and_keeps_the_old_weights(
    sglang: Sglang, tmp_path: Path
) -> None:
    path = models.random(sglang.a, tmp_path / "gone", seed=47)
    async with sglang.admin() as admin:
        await updated(admin, sglang.a, "kept")
        await admin.stage(Source(directory=path), "gone")
        await admin.pause("keep")
        (path / WEIGHTS).rename(tmp_path / "elsewhere")
        with pytest.raises(LockstepError):
            await admin.commit("gone")
        assert await admin.rollback() == "kept"
        await admin.resume()
        assert await probe_off(admin, sglang.a) <= TOLERANCE
