"""Files that are written without waiting for the disk reach it when the caller says so."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from lockstep.checkpoint.files import put_off_syncs, sync, write_whole


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what was synced, in order."""
    names: list[str] = []
    real = os.fsync

    def record(handle: int) -> None:
        names.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        real(handle)

    monkeypatch.setattr(os, "fsync", record)
    return names


def test_nothing_waits_for_the_disk_until_the_caller_does(
    tmp_path: Path, synced: list[str]
) -> None:
    with put_off_syncs() as unsynced:
        write_whole(tmp_path / "a", b"1")
        write_whole(tmp_path / "b", b"2")
        write_whole(tmp_path / "gone", b"3")
        sync(tmp_path / "a")
        assert (tmp_path / "a").read_bytes() == b"1"
        (tmp_path / "gone").unlink()
    assert synced == []
    unsynced.sync()
    assert sorted(synced) == sorted(["a", "b", tmp_path.name])
    unsynced.sync()
    assert len(synced) == 3


def test_who_did_not_put_it_off_waits_as_before(tmp_path: Path, synced: list[str]) -> None:
    with put_off_syncs():
        other = threading.Thread(target=write_whole, args=(tmp_path / "other", b""))
        other.start()
        other.join()
    assert len(synced) == 2
    write_whole(tmp_path / "later", b"")
    assert len(synced) == 4
