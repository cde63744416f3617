"""LockstepAdmin on a real worker: the transaction, three ways of sending, and lost responses."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep.backends.admin import Broadcaster, ProbesStaged, Source, TensorSpec
from lockstep.backends.admin_client import CallBudget, CallBudgets
from lockstep.backends.lockstep.admin import LockstepAdmin
from lockstep.backends.registry import open_admin
from lockstep.engine.weights.broadcast import Broadcast
from lockstep.engine.weights.shared_memory import shared_tensors
from lockstep.models import bundled
from lockstep.tokens.errors import (
    AdapterError,
    BadRequest,
    CheckpointError,
    Conflict,
    DeadlineExceeded,
    NotFound,
    Unauthorized,
    Unavailable,
    UnknownModel,
    UnsupportedField,
)
from tests.backends.scripted import Reply, read_request, serving, whole
from tests.ports import free_port
from tests.processes import TOKEN, WorkerProcess
from tests.worker.adapters import write_adapter

IDS = [[11, 29, 3, 77, 5, 140, 9], [1, 2, 3]]
TINY = Path(str(bundled("tiny")))
NAME = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    process = WorkerProcess("--max-model-len", "512", "--max-num-seqs", "4")
    yield process
    process.stop()


@pytest.fixture
async def admin(worker: WorkerProcess) -> AsyncIterator[LockstepAdmin]:
    """A driver to a worker that serves the bundled weights as "default", unpaused."""
    opened = LockstepAdmin(worker.system_url, TOKEN, backoff=0.01)
    await opened.resume()
    await opened.stage(Source(directory=TINY), "default")
    await opened.commit("default")
    yield opened
    await opened.close()


def tensors(scale: float = 1.1) -> dict[str, torch.Tensor]:
    return {name: scale * t for name, t in load_file(TINY / "model.safetensors").items()}


def write(path: Path, scale: float = 1.1) -> Path:
    shutil.copytree(TINY, path)
    save_file(tensors(scale), path / "model.safetensors", metadata={"format": "pt"})
    return path


def specs(of: dict[str, torch.Tensor]) -> list[TensorSpec]:
    return [TensorSpec(name, "float32", tuple(t.shape)) for name, t in of.items()]


async def test_the_transaction_from_a_directory(admin: LockstepAdmin, tmp_path: Path) -> None:
    before = await admin.probe(IDS)
    await admin.stage(Source(directory=write(tmp_path / "b")), "B")
    view = await admin.view()
    assert (view.version, view.staged, view.paused, view.in_flight) == ("default", "B", False, 0)
    assert await admin.probe(IDS) == before
    await admin.pause("keep", clear_cache=True)
    await admin.commit("B")
    assert await admin.probe(IDS) != before, "a paused worker scores probes"
    view = await admin.view()
    assert (view.version, view.staged, view.paused) == ("B", None, True)
    assert await admin.rollback() == "default"
    await admin.resume()
    await admin.flush()
    assert await admin.probe(IDS) == before
    assert (await admin.view()).incarnation == view.incarnation


async def test_shared_memory_and_a_directory_give_the_same_weights(
    admin: LockstepAdmin, tmp_path: Path
) -> None:
    await admin.stage(Source(directory=write(tmp_path / "b")), "B")
    await admin.commit("B")
    expected = await admin.probe(IDS)
    await admin.rollback()
    with shared_tensors(tensors()) as (name, described):
        await admin.stage(Source(shared=name, tensors=described), "B")
    await admin.commit("B")
    assert await admin.probe(IDS) == expected


@pytest.mark.failure_mode("F34")
async def test_tensors_left_out_are_an_error_unless_the_update_is_partial(
    admin: LockstepAdmin,
) -> None:
    some = {NAME: tensors()[NAME]}
    with shared_tensors(some) as (name, described):
        with pytest.raises(CheckpointError, match=r"lacks.*partial"):
            await admin.stage(Source(shared=name, tensors=described), "part")
        assert (await admin.view()).staged is None
        await admin.stage(Source(shared=name, tensors=described, partial=True), "part")
    await admin.commit("part")


@pytest.mark.failure_mode("F34")
async def test_shared_memory_that_does_not_fit_is_refused(admin: LockstepAdmin) -> None:
    with pytest.raises(NotFound, match="no-such-block"):
        await admin.stage(Source(shared="no-such-block", tensors=specs(tensors())), "X")
    wrong = {NAME: torch.zeros(3, 3)}
    with shared_tensors(wrong) as (name, described):
        with pytest.raises(CheckpointError, match="shape"):
            await admin.stage(Source(shared=name, tensors=described, partial=True), "X")
    with shared_tensors({NAME: torch.full((64, 128), float("nan"))}) as (name, described):
        with pytest.raises(CheckpointError, match="NaN"):
            await admin.stage(Source(shared=name, tensors=described, partial=True), "X")
    assert (await admin.view()).staged is None


async def test_a_broadcast_is_staged_and_not_yet_committed(admin: LockstepAdmin) -> None:
    before, sent = await admin.probe(IDS), tensors()
    for _ in range(2):  # a second trainer takes the place of one that is gone
        group = Broadcaster("127.0.0.1", free_port(), rank=1, world_size=2, seconds=20)
        _, trainer = await asyncio.gather(
            admin.join_group(group), asyncio.to_thread(Broadcast.join, group.host, group.port, 0, 2)
        )
    await asyncio.gather(
        admin.stage(Source(group="weights", tensors=specs(sent)), "sent"),
        asyncio.to_thread(trainer.send, sent.values()),
    )
    view = await admin.view()
    assert (view.version, view.staged) == ("default", "sent")
    assert await admin.probe(IDS) == before
    await admin.commit("sent")
    assert await admin.probe(IDS) != before


async def test_a_source_is_exactly_one(admin: LockstepAdmin) -> None:
    for sources in ({}, {"directory": TINY, "shared": "x"}):
        with pytest.raises(BadRequest, match="exactly one"):
            Source(**sources)  # type: ignore[arg-type]
    with pytest.raises(NotFound, match="no weight group 'nobody'"):
        await admin.stage(Source(group="nobody", tensors=specs(tensors())), "X")


async def test_the_worker_checks_a_stage_too(worker: WorkerProcess, admin: LockstepAdmin) -> None:
    for body, param in (
        ({}, "model_path"),
        ({"model_path": str(TINY), "shared_name": "x"}, "model_path"),
        ({"shared_name": "x"}, "weight_version"),
        ({"shared_name": "../x", "weight_version": "X", "partial": True}, "shared_name"),
    ):
        status, response = await worker.control("stage", **body)
        assert (status, response["error"]["param"]) == (400, param)


@pytest.mark.failure_mode("F25")
async def test_a_stage_that_timed_out_and_still_runs_is_waited_for() -> None:
    under_way = {"error": {"message": "another change is under way", "code": 409}}
    turn = iter([Reply(fault="reset"), *[whole(under_way, 409)] * 9])
    good = whole({"status": "ok", "staged": "B"})
    async with serving(lambda _: next(turn, good)) as server:
        driver = LockstepAdmin(server.url, budgets=QUICK, backoff=0.001)
        await driver.stage(Source(directory=TINY), "B")
        assert len(server.requests) == 11
        await driver.close()
    async with serving(lambda _: whole(under_way, 409)) as server:
        driver = LockstepAdmin(server.url, budgets=QUICK, backoff=0.001)
        with pytest.raises(Conflict, match="under way"):
            await driver.stage(Source(directory=TINY), "B")
        assert len(server.requests) == 1
        await driver.close()


async def test_commit_of_a_version_that_is_not_staged_is_a_conflict(admin: LockstepAdmin) -> None:
    with pytest.raises(Conflict, match=admin.url):
        await admin.commit("B")
    await admin.stage(Source(directory=TINY), "C")
    with pytest.raises(Conflict, match="'C' is staged"):
        await admin.commit("B")
    assert await admin.rollback() == "default"


@pytest.mark.failure_mode("F28")
async def test_weights_staged_after_the_probe_are_not_committed_as_proved(
    admin: LockstepAdmin, tmp_path: Path
) -> None:
    assert isinstance(admin, ProbesStaged)
    source, before = Source(directory=write(tmp_path / "b")), await admin.probe(IDS)
    await admin.stage(source, "B")
    proved = await admin.probe_staged(IDS)
    await admin.stage(Source(directory=write(tmp_path / "other", 1.2)), "B")
    with pytest.raises(Conflict, match="not those which that probe was scored on"):
        await admin.commit_proved("B", proved.proof)
    assert ((await admin.view()).version, await admin.probe(IDS)) == ("default", before)
    await admin.stage(source, "B")
    again = await admin.probe_staged(IDS)
    assert (again.logprobs, again.proof != proved.proof) == (proved.logprobs, True)
    with pytest.raises(Conflict, match="'B' is staged"):
        await admin.commit_proved("C", again.proof)
    await admin.commit_proved("B", again.proof)
    assert ((await admin.view()).version, await admin.probe(IDS)) == ("B", proved.logprobs)


@pytest.mark.failure_mode("F28")
async def test_a_restarted_worker_commits_nothing_as_proved(tmp_path: Path) -> None:
    source, proofs = Source(directory=write(tmp_path / "b")), []
    for _ in range(2):
        process = WorkerProcess("--max-model-len", "512", "--max-num-seqs", "4")
        driver = LockstepAdmin(process.system_url, TOKEN, backoff=0.01)
        try:
            if proofs:
                with pytest.raises(Conflict, match="'B'"):
                    await driver.commit_proved("B", proofs[0])
            await driver.stage(source, "B")
            proofs.append((await driver.probe_staged(IDS)).proof)
            if len(proofs) == 2:
                with pytest.raises(Conflict, match="not those which that probe was scored on"):
                    await driver.commit_proved("B", proofs[0])
                assert (await driver.view()).version == "default"
        finally:
            await driver.close()
            process.stop()


async def test_adapters_are_listed_with_the_label_of_their_contents(
    admin: LockstepAdmin, tmp_path: Path
) -> None:
    base = await admin.probe(IDS)
    label = await admin.load_adapter("ad", write_adapter(tmp_path / "one"))
    assert (await admin.view()).adapters == {"ad": label}
    first = await admin.probe(IDS, adapter="ad")
    assert first != base
    assert await admin.load_adapter("ad", write_adapter(tmp_path / "one", seed=2)) != label
    assert await admin.probe(IDS, adapter="ad") != first
    mine = await admin.load_adapter("ad", tmp_path / "one", "mine")
    assert mine.startswith("mine")
    with pytest.raises(AdapterError, match="adapter_config"):
        await admin.load_adapter("ad", tmp_path)
    assert (await admin.view()).adapters == {"ad": mine}
    await admin.unload_adapter("ad")
    with pytest.raises(UnknownModel, match="'ad'"):
        await admin.unload_adapter("ad")
    assert (await admin.view()).adapters == {}


async def test_auto_recognises_the_system_port_and_rejects_the_data_port(
    worker: WorkerProcess,
) -> None:
    opened = await open_admin(worker.system_url, TOKEN)
    assert (opened.name, opened.stages) == ("lockstep", True)
    await opened.close()
    with pytest.raises(UnsupportedField, match="system_url"):
        await open_admin(worker.url, TOKEN)
    with pytest.raises(Unauthorized):
        await open_admin(worker.system_url, "another-token")


# Lost responses


@dataclass
class Proxy:
    """Stands between driver and worker. `faults` maps a method to what happens, in turn.

    lost: the worker does it, and its response does not arrive. cut: nothing arrives at the worker.
    hang: the worker does it, and the response never ends. late: it is done, but only after `gate`.
    """

    target: str
    url: str = ""
    faults: dict[str, list[str]] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    late: list[asyncio.Task[tuple[int, bytes]]] = field(default_factory=list)

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                request = await read_request(reader)
                method = request.path.rsplit("/", 1)[-1]
                self.seen.append(method)
                waiting = self.faults.get(method, [])
                fault = waiting.pop(0) if waiting else None
                if fault == "late":
                    self.late.append(asyncio.create_task(self.forward(request, after=self.gate)))
                if fault in ("cut", "late"):
                    writer.transport.abort()
                    return
                status, body = await self.forward(request)
                self.arrived.set()
                if fault == "lost":
                    writer.transport.abort()
                    return
                if fault == "hang":
                    await reader.read(1)
                    return
                head = f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n"
                writer.write(head.encode() + body)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    async def forward(self, request, after: asyncio.Event | None = None) -> tuple[int, bytes]:  # type: ignore[no-untyped-def]
        if after is not None:
            await after.wait()
        headers = {"authorization": request.headers["authorization"]}
        async with aiohttp.ClientSession(headers=headers) as session:
            url = self.target + request.path
            kind = {"content-type": "application/json"}
            async with session.post(url, data=request.body, headers=kind) as response:
                return response.status, await response.read()


QUICK = CallBudgets(
    quick=CallBudget(5, 10),
    load=CallBudget(5, 20),
    commit=CallBudget(0.5, 10),
    pause=CallBudget(0.5, 1.2),
)


@asynccontextmanager
async def lossy(
    worker: WorkerProcess, **faults: list[str]
) -> AsyncIterator[tuple[Proxy, LockstepAdmin]]:
    proxy = Proxy(worker.system_url, faults=faults)
    listener = await asyncio.start_server(proxy.talk, "127.0.0.1", 0)
    proxy.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    driver = LockstepAdmin(proxy.url, TOKEN, budgets=QUICK, backoff=0.01)
    try:
        yield proxy, driver
    finally:
        await driver.close()
        listener.close()


@pytest.mark.failure_mode("F25")
@pytest.mark.parametrize("fault", ["lost", "hang"])
async def test_a_commit_whose_response_is_lost_happens_once(
    worker: WorkerProcess, admin: LockstepAdmin, tmp_path: Path, fault: str
) -> None:
    before = await admin.probe(IDS)
    await admin.stage(Source(directory=write(tmp_path / "b")), "B")
    async with lossy(worker, commit=[fault]) as (proxy, driver):
        await driver.commit("B")
        assert proxy.seen.count("commit") == 1
    assert (await admin.view()).version == "B"
    assert await admin.rollback() == "default"
    assert await admin.probe(IDS) == before


@pytest.mark.failure_mode("F28")
async def test_a_proved_commit_whose_response_is_lost_counts_if_the_proved_weights_are_served(
    worker: WorkerProcess, admin: LockstepAdmin, tmp_path: Path
) -> None:
    source = Source(directory=write(tmp_path / "b"))
    await admin.stage(source, "B")
    proved = await admin.probe_staged(IDS)
    async with lossy(worker, commit=["lost", "cut"]) as (proxy, driver):
        await driver.commit_proved("B", proved.proof)
        assert proxy.seen.count("commit") == 1
        # Another caller's "B" is served, and nothing is staged: this commit did not happen.
        await admin.stage(source, "B")
        await admin.commit("B")
        with pytest.raises(Conflict, match="the response was lost"):
            await driver.commit_proved("B", proved.proof)


@pytest.mark.failure_mode("F25")
async def test_a_commit_that_did_not_arrive_is_sent_again(
    worker: WorkerProcess, admin: LockstepAdmin, tmp_path: Path
) -> None:
    await admin.stage(Source(directory=write(tmp_path / "b")), "B")
    async with lossy(worker, commit=["cut"]) as (proxy, driver):
        await driver.commit("B")
        assert proxy.seen.count("commit") == 2
    assert (await admin.view()).version == "B"


@pytest.mark.failure_mode("F36")
async def test_a_pause_or_resume_that_arrives_late_does_not_undo_a_later_one(
    worker: WorkerProcess, admin: LockstepAdmin
) -> None:
    faults = {"resume_generation": ["late"], "pause_generation": ["late"]}
    async with lossy(worker, **faults) as (proxy, driver):
        await driver.pause("keep")  # the first of each is thought lost, and sent again
        await driver.resume()
        await driver.pause("keep")
        proxy.gate.set()
        responses = await asyncio.gather(*proxy.late)
        assert [status for status, _ in responses] == [409, 409]
        assert (await admin.view()).paused
        await admin.resume()  # another caller has its own sequence numbers
        assert not (await admin.view()).paused


@pytest.mark.failure_mode("F25")
async def test_a_rollback_never_undoes_two_steps(
    worker: WorkerProcess, admin: LockstepAdmin, tmp_path: Path
) -> None:
    await admin.stage(Source(directory=write(tmp_path / "b")), "B")
    await admin.commit("B")
    with shared_tensors({NAME: tensors()[NAME]}) as (name, described):
        await admin.stage(Source(shared=name, tensors=described, partial=True), "C")
    async with lossy(worker, rollback=["lost"]) as (_, driver):
        assert await driver.rollback() == "B"
    assert (await admin.view()).version == "B"
    # A copy of a rollback that arrives after its repetition finds other weights, and is refused.
    async with lossy(worker, rollback=["late"]) as (proxy, driver):
        assert await driver.rollback() == "default"
        await admin.stage(Source(directory=TINY), "D")
        proxy.gate.set()
        status, _ = await proxy.late[0]
        assert status == 409
    assert (await admin.view()).staged == "D"


@pytest.mark.failure_mode("F25")
async def test_staging_and_loading_survive_lost_responses(
    worker: WorkerProcess, admin: LockstepAdmin, tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "ad")
    faults = {
        "stage": ["lost", "cut"],
        "load_lora_adapter": ["lost"],
        "unload_lora_adapter": ["lost"],
        "probe": ["cut"],
        "pause_generation": ["hang"],
        "resume_generation": ["lost"],
    }
    async with lossy(worker, **faults) as (proxy, driver):
        await driver.stage(Source(directory=TINY), "S")
        await driver.pause("keep")
        await driver.commit("S")
        await driver.resume()
        label = await driver.load_adapter("ad", path)
        assert (await driver.view()).adapters == {"ad": label}
        assert await driver.probe(IDS, adapter="ad")
        await driver.unload_adapter("ad")
        assert proxy.seen.count("unload_lora_adapter") == 1
    assert (await admin.view()).adapters == {}


@pytest.mark.failure_mode("F36")
async def test_a_worker_that_hangs_in_pause_costs_a_bounded_time_and_is_named(
    worker: WorkerProcess, admin: LockstepAdmin
) -> None:
    async with lossy(worker, pause_generation=["hang"] * 9) as (proxy, driver):
        with pytest.raises(DeadlineExceeded, match=proxy.url):
            await driver.pause("keep")
        assert proxy.seen.count("pause_generation") <= 3


async def test_a_cancelled_call_leaves_the_driver_usable(
    worker: WorkerProcess, admin: LockstepAdmin
) -> None:
    async with lossy(worker, pause_generation=["hang"]) as (proxy, driver):
        task = asyncio.create_task(driver.pause("keep"))
        await proxy.arrived.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await driver.view()).paused
        await driver.resume()


@pytest.mark.failure_mode("F35")
async def test_a_worker_that_is_gone_is_unavailable_and_named() -> None:
    process = WorkerProcess("--max-model-len", "64", "--max-num-seqs", "1")
    driver = LockstepAdmin(process.system_url, TOKEN, backoff=0.01)
    await driver.stage(Source(directory=TINY), "B")
    process.stop(9)
    call: Callable[[], object]
    for call in (driver.view, driver.rollback, lambda: driver.commit("B")):
        with pytest.raises(Unavailable, match=process.system_url):
            await call()  # type: ignore[misc]
    await driver.close()
    with pytest.raises(Unavailable, match="closed"):
        await driver.view()
