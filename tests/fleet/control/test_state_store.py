"""The file of the desired state: for one process at a time and one model, and no other file."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.storage.sqlite.control import SqliteControlStore
from lockstep.tokens.errors import BadRequest


def test_a_state_file_that_another_process_holds_is_refused_with_its_pid(tmp_path: Path) -> None:
    where = str(tmp_path / "state.sqlite")
    code = (
        "import sys, time\nfrom lockstep.storage.sqlite.control import SqliteControlStore\n"
        "store = SqliteControlStore(sys.argv[1]); print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, where], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(BadRequest, match=rf"process {holder.pid}: stop it, or .*--state-dir"):
            SqliteControlStore(where)
    finally:
        holder.kill()
        holder.communicate()
    asyncio.run(SqliteControlStore(where).close())  # a holder that was killed holds it no more


async def test_a_state_file_belongs_to_one_model(tmp_path: Path) -> None:
    where = str(tmp_path / "state.sqlite")
    await SqliteControlStore(where, model="tiny (1a2b)").close()
    await SqliteControlStore(where, model="tiny (1a2b)").close()
    with pytest.raises(BadRequest, match=r"state of tiny \(1a2b\), and tiny-moe .*--fresh"):
        SqliteControlStore(where, model="tiny-moe (3c4d)")
    await SqliteControlStore(where, model="tiny (1a2b)").close()  # the refusal let go of the lock


def test_a_file_that_holds_no_state_is_rejected_by_name(tmp_path: Path) -> None:
    where = tmp_path / "state.sqlite"
    where.write_bytes(b"not a database" * 100)
    with pytest.raises(BadRequest, match=r"state\.sqlite cannot be used .*--state-dir"):
        SqliteControlStore(str(where))


async def test_the_state_is_for_its_owner_only_also_where_it_was_not(tmp_path: Path) -> None:
    where = tmp_path / "state.sqlite"
    where.touch(mode=0o644)
    where.chmod(0o644)
    store = SqliteControlStore(str(where))
    await store.save(await store.desired())
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert set(modes.values()) == {0o600}, modes
    await store.close()
