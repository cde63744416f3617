"""What a gateway keeps, where, and what it says of an earlier run: real processes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.serving.model_identity import ModelIdentity
from lockstep.fleet.remote import RemoteFleet
from lockstep.models import bundled
from lockstep.storage.desired_state import Desired
from lockstep.storage.sqlite.control import SqliteControlStore
from tests.engine import checkpoints
from tests.processes import TOKEN, WorkerProcess

PORTS = ("--port", "0", "--admin-port", "0")


@contextmanager
def lockstep(cwd: Path, *arguments: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """The command in that directory, with a state home beside it; made to end with the block."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("LOCKSTEP_")}
    clean |= {"XDG_STATE_HOME": str(cwd.parent / "state-home"), "LOCKSTEP_ADMIN_TOKEN": TOKEN}
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep", *arguments],
        cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**clean, **environ},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ready_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"it ended: {process.communicate()[1]}")
    ready: dict[str, Any] = json.loads(line)
    return ready


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors


def failure_of(cwd: Path, *arguments: str) -> tuple[str, float]:
    """What a command that must not start says, and how many seconds that took."""
    begun = time.monotonic()
    with lockstep(cwd, *arguments) as process:
        out, errors = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, ""), errors
    assert "Traceback" not in errors
    return errors, time.monotonic() - begun


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    made = tmp_path / "cwd"
    made.mkdir()
    return made


def update(ready: dict[str, Any], checkpoint: Path, version: str) -> None:
    async def work() -> None:
        async with RemoteFleet(ready["admin_url"], token=TOKEN) as fleet:
            await fleet.update_weights(checkpoint, version)

    asyncio.run(work())


def test_an_updated_fleet_resumes_its_own_model_and_no_other(cwd: Path, tmp_path: Path) -> None:
    tiny = bundled("tiny")
    assert tiny is not None
    checkpoint = checkpoints.variant(tiny, tmp_path / "step_7", seed=7)
    with lockstep(cwd, "serve", "tiny", "--json", *PORTS) as process:
        ready = ready_of(process)
        assert ready["resumed"] is None
        update(ready, checkpoint, "step_7")
        stop(process)

    with lockstep(cwd, "serve", "tiny-moe", "--json", *PORTS) as process:
        other = ready_of(process)
        assert (other["resumed"], other["state_dir"] == ready["state_dir"]) == (None, False)
        stop(process)

    with lockstep(cwd, "serve", "tiny", *PORTS) as process:
        assert process.stderr is not None
        shown = [process.stderr.readline() for _ in range(2)]
        assert shown[0] == f"State: {ready['state_dir']}\n"
        assert shown[1] == f"Resuming version step_7 from {checkpoint}; --fresh starts over.\n"

    held = Path(ready["state_dir"])
    errors, _ = failure_of(cwd, "serve", "tiny-moe", *PORTS, "--state-dir", str(held))
    assert "is the state of tiny (" in errors
    assert "tiny-moe" in errors
    assert "--fresh" in errors

    shutil.rmtree(checkpoint)
    errors, seconds = failure_of(cwd, "serve", "tiny", *PORTS)
    assert f"{checkpoint} is missing" in errors
    assert "version 'step_7'" in errors
    assert "--fresh" in errors
    assert seconds < 15

    with lockstep(cwd, "serve", "tiny", "--json", *PORTS, "--fresh") as process:
        assert ready_of(process)["resumed"] is None
        stop(process)
    (aside,) = held.glob("before-*")
    assert {"state.sqlite", "sessions.sqlite"} <= {file.name for file in aside.iterdir()}
    stored = asyncio.run(SqliteControlStore(str(aside / "state.sqlite")).desired())
    assert stored.version == "step_7"
    assert list(cwd.iterdir()) == []


def test_a_checkpoint_root_binds_a_resume_and_must_exist(cwd: Path, tmp_path: Path) -> None:
    allowed, other = tmp_path / "allowed", tmp_path / "other"
    allowed.mkdir()
    other.mkdir()
    checkpoint = checkpoints.variant(bundled("tiny") or Path(), allowed / "step_7", seed=7)
    root = ("--checkpoint-root", str(allowed))
    with lockstep(cwd, "serve", "tiny", "--json", *PORTS, *root) as process:
        update(ready_of(process), checkpoint, "step_7")
        stop(process)
    errors, _ = failure_of(cwd, "serve", "tiny", *PORTS, "--checkpoint-root", str(other))
    plain = " ".join(errors.split())
    assert f"version 'step_7' from {checkpoint}, which is outside --checkpoint-root" in plain
    assert "--fresh" in plain
    missing = tmp_path / "missing"
    errors, _ = failure_of(cwd, "serve", "tiny", *PORTS, "--checkpoint-root", str(missing))
    assert f"--checkpoint-root {missing} is not a directory" in " ".join(errors.split())
    with lockstep(cwd, "serve", "tiny", "--json", *PORTS, *root) as process:
        assert ready_of(process)["resumed"] == "step_7"


def test_a_state_of_the_first_release_is_taken_over_or_mentioned(cwd: Path, tmp_path: Path) -> None:
    checkpoint = checkpoints.variant(bundled("tiny") or Path(), tmp_path / "step_7", seed=7)
    with lockstep(cwd, "serve", "tiny", "--json", *PORTS, "--state-dir", str(cwd)) as process:
        update(ready_of(process), checkpoint, "step_7")
        stop(process)
    for name in ("state", "sessions"):  # their names then; what is in them is read unchanged
        for file in cwd.glob(f"{name}.sqlite*"):
            file.rename(cwd / f"lockstep-{file.name}")
    with lockstep(cwd, "serve", "tiny", "--json", *PORTS) as process:
        assert ready_of(process)["resumed"] is None
        process.send_signal(signal.SIGTERM)
        errors = process.communicate(timeout=60)[1]
        assert "lockstep-state.sqlite and lockstep-sessions.sqlite of the first release" in errors
        assert f"--state-dir {cwd} continues with it" in errors
    with lockstep(cwd, "serve", "tiny", "--json", *PORTS, "--state-dir", str(cwd)) as process:
        assert ready_of(process)["resumed"] == "step_7"
    assert not list(cwd.glob("lockstep-*.sqlite"))


def test_two_gateways_never_share_a_state_directory(cwd: Path, tmp_path: Path) -> None:
    where = tmp_path / "kept"
    where.mkdir(mode=0o755)
    with lockstep(cwd, "serve", "tiny", "--json", *PORTS, "--state-dir", str(where)) as process:
        assert ready_of(process)["state_dir"] == str(where)
        assert where.stat().st_mode & 0o077 == 0
        for more in ((), ("--fresh",)):
            errors, _ = failure_of(cwd, "serve", *PORTS, "--state-dir", str(where), *more)
            assert f"process {process.pid}: stop it, or give another --state-dir" in errors
        assert not list(where.glob("before-*"))  # what the first one uses was not moved away
        stop(process)
    assert list(cwd.iterdir()) == []


def test_a_gateway_before_running_workers_has_a_state_of_their_model(
    cwd: Path, tmp_path: Path
) -> None:
    worker = WorkerProcess("--max-model-len", "256")
    gateway = ("gateway", "--worker", f"{worker.url},{worker.system_url}", *PORTS)
    try:
        with lockstep(cwd, *gateway, "--json") as process:
            where = Path(ready_of(process)["state_dir"])
            assert where.parent == cwd.parent / "state-home/lockstep"
            assert where.name.startswith("tiny-")
            errors, _ = failure_of(cwd, *gateway)
            assert f"process {process.pid}" in errors
            stop(process)
        asyncio.run(SqliteControlStore(str(tmp_path / "state.sqlite"), model="another").close())
        errors, _ = failure_of(cwd, *gateway, "--state-dir", str(tmp_path))
        assert "is the state of another, and tiny is to be served" in errors
    finally:
        worker.stop()


def test_weights_that_are_in_no_file_cannot_be_resumed(cwd: Path, tmp_path: Path) -> None:
    where = tmp_path / "kept"
    where.mkdir()
    label = ModelIdentity.of_files("tiny").label
    store = SqliteControlStore(str(where / "state.sqlite"), model=label)
    asyncio.run(store.save(Desired(version="step_9", agreed=("default", "step_9"))))
    asyncio.run(store.close())
    errors, seconds = failure_of(cwd, "serve", "tiny", *PORTS, "--state-dir", str(where))
    assert "'step_9', which came by broadcast" in errors
    assert "--fresh" in errors
    assert seconds < 15


def test_a_fleet_that_was_never_updated_may_start_otherwise(cwd: Path, tmp_path: Path) -> None:
    arguments = ("serve", "tiny", "--json", *PORTS, "--state-dir", str(tmp_path / "kept"))
    with lockstep(cwd, *arguments) as process:
        ready_of(process)
        stop(process)
    with lockstep(cwd, *arguments, "--worker-args", "--weight-version base") as process:
        assert ready_of(process)["resumed"] is None
        stop(process)


def test_a_state_home_that_cannot_be_made_is_named_with_the_way_out(cwd: Path) -> None:
    (cwd.parent / "state-home").write_text("a file")
    errors, _ = failure_of(cwd, "serve", "tiny", *PORTS)
    assert "state-home" in errors
    assert "--state-dir" in errors


def test_a_shard_that_is_gone_is_the_file_that_is_named(tmp_path: Path) -> None:
    from lockstep.cli.serving.state_dir import _missing_file

    whole = tmp_path / "model"
    whole.mkdir()
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (whole / "model.safetensors.index.json").write_text(json.dumps(index))
    (whole / "1.safetensors").touch()
    assert _missing_file(whole) == whole / "2.safetensors"
    (whole / "2.safetensors").touch()
    assert _missing_file(whole) is None


def test_the_identity_of_a_model_is_what_it_is_and_not_where_it_lies(tmp_path: Path) -> None:
    tiny = bundled("tiny")
    assert tiny is not None
    mine = ModelIdentity.of_files("tiny")
    copy = tmp_path / "tiny"
    shutil.copytree(tiny, copy)
    for file in copy.iterdir():
        os.utime(file, (1, 1))
    assert ModelIdentity.of_files(str(copy)) == mine
    weights = copy / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    tuned = ModelIdentity.of_files(str(copy))
    assert (tuned.label, tuned.directory_name) != (mine.label, mine.directory_name)
    assert ModelIdentity.of_files("Qwen/Qwen3-0.6B").directory_name.startswith("Qwen-Qwen3-0.6B-")
