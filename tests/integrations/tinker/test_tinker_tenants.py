"""Tenants of one trainer: separate runs, and samplers found in the store of their tenant."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
from starlette.requests import Request

from lockstep.gateway.callers import Caller
from lockstep.http.handlers import CALLER
from lockstep.integrations.tinker.protocol import json_bodies as bodies
from lockstep.integrations.tinker.samplers import Samplers
from lockstep.integrations.tinker.sampling_service import BaseModel, SamplingService
from lockstep.integrations.tinker.tinker_service import LoraTrainer, TinkerService
from lockstep.integrations.tinker.tinker_store import CheckpointRecord, now
from lockstep.integrations.tinker.tinker_tenants import TinkerTenants
from lockstep.tokens.errors import BadRequest, Gone, NotFound

BASE = BaseModel(("tiny",), Path("/models/tiny"), 128)


class Directories:
    """Samplers that are served under the directories of their weights."""

    async def serve(self, directory: Path | None) -> str:
        return str(directory)

    async def forget(self, directory: Path) -> None:
        assert directory.exists()

    def check_base(self) -> None:
        pass


def tenants_of(root: Path) -> TinkerTenants:
    return TinkerTenants(BASE, cast("LoraTrainer", None), cast("Samplers", Directories()), root)


@pytest.fixture
def tenants(tmp_path: Path) -> TinkerTenants:
    return tenants_of(tmp_path / "gateway" / "tinker")


def by(tenants: TinkerTenants, tenant: str) -> TinkerService:
    scope = {"type": "http", "state": {CALLER: Caller(tenant, cache_scope=tenant)}}
    return tenants.of(Request(scope))


def saved(service: TinkerService, name: str = "one") -> str:
    """Save sampler weights in a new session, and return their path."""
    session = service.create_session(bodies.CreateSession()).session_id
    record = CheckpointRecord(
        model_id=f"{session}:train:0", kind="sampler_weights", name=name, created=now()
    )
    with service.store.writing(record) as directory:
        (directory / "file").write_text("weights")
    return record.path


def sampler_of(service: SamplingService, path: str) -> str:
    session_id = path.removeprefix("tinker://").partition(":")[0]
    request = bodies.CreateSamplingSession(
        session_id=session_id, sampling_session_seq_id=1, model_path=path, base_model="tiny"
    )
    return service.create_sampling_session(request).sampler_id


def test_runs_of_a_tenant_are_invisible_to_others(tenants: TinkerTenants, tmp_path: Path) -> None:
    mine = by(tenants, "mine").create_session(bodies.CreateSession())
    assert by(tenants, "mine").store.live_session(mine.session_id) == mine
    for other in ("..", "his", "default"):
        with pytest.raises(Gone):
            by(tenants, other).store.live_session(mine.session_id)
        assert by(tenants, other).store.sessions() == []
    assert by(tenants, "mine").sampling.cache_salt == "mine"
    # The files of the default tenant, and one directory for each other tenant.
    assert len(list((tmp_path / "gateway" / "tinker").rglob("sessions"))) == 4
    assert len(list(tmp_path.rglob("sessions"))) == 4


def test_files_of_a_tenant_are_closed_to_other_users(
    tenants: TinkerTenants, tmp_path: Path
) -> None:
    for tenant in ("default", "alice"):
        saved(by(tenants, tenant))
        assert by(tenants, tenant).store.root.stat().st_mode & 0o077 == 0
    records = [path for path in tmp_path.rglob("*.json") if path.parent.name != "adapter"]
    assert records
    assert all(path.stat().st_mode & 0o077 == 0 for path in records)


async def test_names_of_other_models_are_not_samplers(tenants: TinkerTenants) -> None:
    assert await tenants.served_as("gpt-4", "default") is None
    for name in ("tinker://run/sampler_weights/name", "session:sample:1"):
        with pytest.raises(NotFound, match="does not exist on this server"):
            await tenants.served_as(name, "default")
    with pytest.raises(BadRequest, match="expected tinker://RUN/"):
        await tenants.served_as("tinker://run/name", "default")


async def test_a_sampler_is_found_in_the_store_of_its_tenant(
    tenants: TinkerTenants, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {name: saved(by(tenants, name)) for name in ("default", "alice", "bob")}
    own = {name: sampler_of(by(tenants, name).sampling, path) for name, path in paths.items()}
    again = tenants_of(tmp_path / "gateway" / "tinker")  # the next process knows them as well
    for each in (tenants, again):
        for other in ("default", "alice"):
            monkeypatch.setattr(by(each, other).sampling, "directory", None)
        where = by(each, "bob").store.checkpoint(paths["bob"])[1]
        assert await each.served_as(paths["bob"], "bob") == str(where)
        assert await each.served_as(own["bob"], "bob") == str(where)


async def test_a_sampler_of_another_tenant_is_not_found(tenants: TinkerTenants) -> None:
    path = saved(by(tenants, "alice"))
    sampler = sampler_of(by(tenants, "alice").sampling, path)
    for tenant in ("bob", "default", "never seen"):
        for name in (path, sampler):
            with pytest.raises(NotFound, match="does not exist on this server"):
                await tenants.served_as(name, tenant)
    assert await tenants.served_as(path, "alice") == await tenants.served_as(sampler, "alice")


async def test_a_deleted_sampler_is_an_error_until_it_is_saved_again(
    tenants: TinkerTenants,
) -> None:
    alice = by(tenants, "alice")
    first, second = saved(alice), saved(alice)
    await alice.delete(first)
    with pytest.raises(NotFound, match="does not exist on this server"):
        await tenants.served_as(first, "alice")
    assert await tenants.served_as(second, "alice")
    record = CheckpointRecord(
        model_id=first.removeprefix("tinker://").partition("/")[0],
        kind="sampler_weights", name="one", created=now(),
    )  # fmt: skip
    with alice.store.writing(record):
        pass
    assert await tenants.served_as(first, "alice") == str(alice.store.directory(record))
