"""A fleet whose workers know only URLs: updates, joiners and faults, over real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.stores.upload_checkpoint import upload
from lockstep.engine import exact
from lockstep.engine.probe import remember, save_checkpoint
from lockstep.fleet.remote import RemoteFleet
from lockstep.models import bundled
from lockstep.tokens.errors import LockstepError
from tests.processes import TOKEN, ServeProcess, WorkerProcess
from tests.stores.s3_server import SECRET, S3Server

pytestmark = pytest.mark.exact_arithmetic
SMALL = "--max-model-len 256 --max-num-seqs 4"


class Trainer:
    """Saves steps of a model, each a delta on the one before, and stores them."""

    def __init__(self, s3: S3Server, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        model = AutoModelForCausalLM.from_pretrained(bundled("tiny"), dtype=torch.float32)
        self.model = exact.prepare(model.eval())
        remember(self.model)
        self._s3, self._directory, self._last = s3, directory, None
        self.steps = 0

    def save(self) -> str:
        self.steps += 1
        rng = torch.Generator().manual_seed(self.steps)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter[torch.rand(parameter.shape, generator=rng) < 0.02] *= 1.05
        name = f"step-{self.steps}"
        self._last = save_checkpoint(
            self.model, self._directory / name, version=name, base=self._last
        )
        url = self._s3.url(f"run/{name}")
        upload(self._last, url)
        return url


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def environment(s3: S3Server, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CHECKPOINT_CACHE", str(cache))


@pytest.fixture(scope="module")
def served(
    server: S3Server, cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServeProcess]:
    process = ServeProcess(
        "--workers", "2", "--sessions", "memory", "--checkpoint-root", server.url("run"),
        "--worker-args", f"{SMALL} --checkpoint-root {server.url('run')}",
        "--state-dir", str(tmp_path_factory.mktemp("state")),
        LOCKSTEP_CHECKPOINT_CACHE=str(cache), **server.environ,
    )  # fmt: skip
    yield process
    process.stop()


@pytest.fixture(scope="module")
def trainer(server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environ.items():
            patch.setenv(name, value)
        yield Trainer(server, tmp_path_factory.mktemp("trainer"))


async def versions(fleet: RemoteFleet) -> dict[str, Any]:
    return {row["id"]: (row["state"], row["version"]) for row in await fleet.workers()}


@pytest.mark.usefixtures("environment")
async def test_workers_that_know_only_a_url_serve_proved_weights(
    served: ServeProcess, trainer: Trainer, s3: S3Server
) -> None:
    async with RemoteFleet(served.admin_url, token=TOKEN) as fleet:
        first = await fleet.update_weights(trainer.save())
        assert first.version == "step-1"
        assert first.fetched is not None
        # The gateway validates first, and its host is that of the workers.
        assert first.fetched.nbytes == first.fetched.total > 0
        results = list(first.workers.values())
        assert len(results) == 2
        for result in results:
            assert result.evidence is not None
            assert (result.status, result.evidence.decided_by) == ("ok", "bits")
            assert result.fetched is not None
            assert result.fetched.nbytes == 0
        s3.forget()
        second = await fleet.update_weights(trainer.save())
        assert second.delta is not None
        assert second.fetched is not None
        assert 0 < second.fetched.nbytes < second.fetched.total / 2
        assert s3.count("step-1/model") == 0
        assert set((await versions(fleet)).values()) == {("serving", "step-2")}
        assert SECRET not in json.dumps(await fleet.state())


@pytest.mark.usefixtures("environment")
async def test_a_worker_on_another_host_joins_by_anchor_and_chain(
    served: ServeProcess, trainer: Trainer, s3: S3Server, tmp_path: Path
) -> None:
    async with RemoteFleet(served.admin_url, token=TOKEN) as fleet:
        if trainer.steps < 2:
            for _ in range(2):
                await fleet.update_weights(trainer.save())
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LOCKSTEP_CHECKPOINT_CACHE", str(tmp_path / "another-host"))
            # WorkerProcess drops LOCKSTEP_ variables: the cache is then that of its home.
            patch.setenv("XDG_CACHE_HOME", str(tmp_path / "another-host"))
            worker = WorkerProcess(*SMALL.split())
        try:
            s3.forget()
            await fleet.add_worker(
                worker.url, admin_url=worker.system_url, admin_token=TOKEN, id="joiner"
            )
            states = await versions(fleet)
            assert states["joiner"] == ("serving", f"step-{trainer.steps}"), states
            assert s3.count("step-1/model.safetensors") > 0
            assert s3.count("step-2/delta.safetensors") > 0
            s3.forget()
            operation = await fleet.update_weights(trainer.save())
            fetched = operation.workers["joiner"].fetched
            assert fetched is not None
            assert (
                0 < fetched.nbytes <= fetched.total
            )  # the delta alone, for the weights it changes
            assert s3.count("step-1/model") == 0  # the gateway reads the manifests of the chain
            assert fetched.total < 200_000
        finally:
            await fleet.drain("joiner", drain_seconds=0)
            worker.stop(9)


@pytest.mark.failure_mode("F88")
@pytest.mark.usefixtures("environment")
async def test_an_update_from_a_broken_store_changes_nothing(
    served: ServeProcess, trainer: Trainer, s3: S3Server
) -> None:
    async with RemoteFleet(served.admin_url, token=TOKEN) as fleet:
        await fleet.update_weights(trainer.save())
        before = await versions(fleet)
        url = trainer.save()
        payload = s3.file(f"run/step-{trainer.steps}/delta.safetensors")
        good = payload.read_bytes()
        payload.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        with pytest.raises(LockstepError, match=r"delta\.safetensors has SHA-256"):
            await fleet.update_weights(url)
        with pytest.raises(LockstepError, match="outside the allowed roots"):
            await fleet.update_weights(s3.url("elsewhere/step-1"))
        s3.fail("", "403", count=1000)
        with pytest.raises(LockstepError, match="refused access") as refused:
            await fleet.update_weights(url)
        assert SECRET not in refused.value.message
        s3.forget()
        assert await versions(fleet) == before
        payload.write_bytes(good)
        operation = await fleet.update_weights(url)
        assert operation.status == "done"


def test_the_command_uploads_shows_and_verifies(
    s3: S3Server, trainer: Trainer, tmp_path: Path
) -> None:
    path = save_checkpoint(trainer.model, tmp_path / "alone", version="alone")

    def lockstep(*arguments: str) -> str:
        command = [sys.executable, "-m", "lockstep", "checkpoints", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    url = s3.url("run/alone")
    assert "bytes in" in lockstep("upload", str(path), url)
    assert "complete already" in lockstep("upload", str(path), url)
    assert json.loads(lockstep("show", url, "--json"))["version"] == "alone"
    assert "as written" in lockstep("verify", url)
    lockstep("apply", url, str(tmp_path / "full"))
    manifest = Manifest.read(tmp_path / "full")
    assert manifest is not None
