"""The store: atomic checkpoints, and names that cannot escape its directory."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from lockstep.integrations.tinker.tinker_store import (
    CheckpointRecord,
    Kind,
    RunRecord,
    SamplerRecord,
    TinkerStore,
    now,
)
from lockstep.tokens.errors import BadRequest, Conflict, NotFound

RUN = "s:train:0"


def checkpoint(name: str = "one", kind: Kind = "weights") -> CheckpointRecord:
    return CheckpointRecord(model_id=RUN, kind=kind, name=name, created=now(), steps=3)


@pytest.fixture
def store(tmp_path: Path) -> TinkerStore:
    store = TinkerStore(tmp_path / "state")
    store.put_run(RunRecord(model_id=RUN, base_model="tiny", rank=8, created=now()))
    return store


def write(store: TinkerStore, record: CheckpointRecord, text: str = "weights") -> None:
    with store.writing(record) as directory:
        (directory / "file").write_text(text)


def test_records_are_found_by_the_next_process(store: TinkerStore) -> None:
    write(store, checkpoint())
    record, directory = TinkerStore(store.root).checkpoint(f"tinker://{RUN}/weights/one")
    assert (record.steps, record.size) == (3, 7)
    assert (directory / "file").read_text() == "weights"
    assert TinkerStore(store.root).run(RUN).rank == 8


def test_an_incomplete_checkpoint_does_not_exist(store: TinkerStore) -> None:
    def fails() -> None:
        with store.writing(checkpoint()) as directory:
            (directory / "file").write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    (partial,) = store.root.glob("runs/*/weights/.*")
    (partial / "record.json").write_bytes(msgspec.json.encode(checkpoint()))
    assert store.checkpoints() == []
    write(store, checkpoint())
    assert len(store.checkpoints(RUN)) == 1


def test_an_existing_checkpoint_is_only_replaced_with_overwrite(store: TinkerStore) -> None:
    write(store, checkpoint())
    with pytest.raises(Conflict, match="exists: choose another name"):
        write(store, checkpoint(), "other")
    with store.writing(checkpoint(), overwrite=True) as directory:
        (directory / "file").write_text("new")
    _, directory = store.checkpoint(f"tinker://{RUN}/weights/one")
    assert (directory / "file").read_text() == "new"


@pytest.mark.parametrize("name", ["..", "../../x", ".hidden", "a/b", "a\0b", "%2e%2e"])
def test_no_name_escapes_the_directory(store: TinkerStore, name: str) -> None:
    write(store, checkpoint(name))
    (record,) = store.checkpoints(RUN)
    assert record.name == name
    inside = [path for path in store.root.rglob("file") if path.is_file()]
    assert [path.parent.parent.name for path in inside] == ["weights"]


@pytest.mark.parametrize(
    "path",
    ["", "tinker://a/weights", "tinker://a/other/b", "/etc/passwd", "tinker://a/weights/b/c"],
)
def test_a_malformed_path_is_an_error(store: TinkerStore, path: str) -> None:
    with pytest.raises(BadRequest, match="expected tinker://RUN/weights/NAME"):
        store.checkpoint(path)


def test_expired_checkpoints_are_not_found_and_deleted(store: TinkerStore) -> None:
    write(store, checkpoint())
    path = f"tinker://{RUN}/weights/one"
    store.set_ttl(path, 3600)
    assert store.checkpoints()[0].expires is not None
    store.set_ttl(path, -1)
    with pytest.raises(NotFound, match="expired"):
        store.checkpoint(path)
    store.sweep(timedelta(days=1))
    assert not list(store.root.rglob("file"))


def test_old_unnamed_samplers_are_deleted_and_new_ones_stay(store: TinkerStore) -> None:
    for name, age in (("old", 3), ("young", 1)):
        with store.writing_ephemeral(name) as directory:
            (directory / "file").write_text(name)
        created = now() - timedelta(days=age)
        store.put_sampler(SamplerRecord(sampler_id=name, base_model="tiny", created=created))
    store.sweep(timedelta(days=2))
    assert [each.sampler_id for each in store.samplers()] == ["young"]
    with pytest.raises(NotFound, match="sampling session 'old' does not exist"):
        store.sampler("old")
