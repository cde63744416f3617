"""A run in one file can be audited elsewhere, and opening it runs none of its author's code."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.replay import audit, bisect, replay, write_pack
from lockstep.tokens.errors import BadRequest, Conflict
from tests.replay.conftest import altered

CODE = """
from pathlib import Path
Path("executed").touch()
from lockstep.train.envs.bundled import Reverse as Environment
"""


@pytest.fixture(scope="module")
def packed(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "run.tar"
    written = write_pack(recorded, path)
    assert written.left_out == ()
    return path


@pytest.mark.exact_arithmetic
async def test_a_pack_is_audited_without_the_run(packed: Path) -> None:
    outcome = await audit(packed, fraction=0.1, seed=2)
    assert outcome.held
    assert outcome.replay is not None
    assert outcome.replay.mode == "bits"
    assert outcome.replay.tokens > 0
    assert outcome.replay.rewards == 16 * len(outcome.chosen)  # a bundled environment
    assert not (packed.parent / "audits.jsonl").exists()


def test_a_pack_equals_its_run_and_packs_of_one_run_are_equal(
    recorded: Path, packed: Path, tmp_path: Path
) -> None:
    assert bisect(recorded, packed).same
    write_pack(recorded, tmp_path / "again.tar")
    assert (tmp_path / "again.tar").read_bytes() == packed.read_bytes()
    with tarfile.open(packed) as archive:
        names = archive.getnames()
    assert names[:2] == ["pack.json", "chain.jsonl"]
    assert "model/model.safetensors" in names
    assert not [name for name in names if name.startswith(("checkpoints", "state"))]
    with pytest.raises(BadRequest, match="exists already"):
        write_pack(recorded, packed)


def test_a_run_that_does_not_hold_is_not_packed(recorded: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(recorded, tmp_path / "run"))
    (run / "chain" / "step-2.json.gz").unlink()
    with pytest.raises(BadRequest, match=r"cannot be packed: .*step-2\.json\.gz cannot be read"):
        write_pack(run, tmp_path / "run.tar")
    assert not (tmp_path / "run.tar").exists()

    def other_model(record: dict[str, Any], _: dict[str, Any]) -> None:
        if record["kind"] == "start":
            record["model"]["model.safetensors"] = "0" * 64

    with pytest.raises(Conflict, match="not the file that the run started from"):
        write_pack(altered(recorded, tmp_path / "other", other_model), tmp_path / "run.tar")


async def test_code_of_a_pack_runs_only_when_it_is_trusted(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def own_environment(record: dict[str, Any], _: dict[str, Any]) -> None:
        if record["kind"] == "start":
            record["config"]["env"]["name"] = "its_code:Environment"

    pack, here = tmp_path / "run.tar", tmp_path / "here"
    write_pack(altered(recorded, tmp_path / "run", own_environment), pack)
    here.mkdir()
    (here / "its_code.py").write_text(CODE)
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(here)
    with tarfile.open(pack) as archive:  # extracted by hand, it is still a pack
        archive.extractall(here / "extracted", filter="data")
    for run in (pack, here / "extracted"):
        outcome = await replay(run, last=1)
        assert outcome.differences == []
        assert not Path("executed").exists()
        (listed,) = outcome.from_record
        assert "whose code is that of the run's author and was not run (--trust-code" in listed
    outcome = await replay(pack, last=1, trust_code=True)
    assert Path("executed").exists()
    assert outcome.rewards == 16
    assert outcome.from_record == {}


def rewrite(pack: Path, target: Path, change: Callable[[tarfile.TarFile], None]) -> Path:
    """Return a copy of a pack to which `change` adds members."""
    shutil.copy(pack, target)
    with tarfile.open(target, "a") as archive:
        change(archive)
    return target


def add(archive: tarfile.TarFile, name: str, data: bytes = b"{}", **fields: Any) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    for field, value in fields.items():
        setattr(member, field, value)
    archive.addfile(member, io.BytesIO(data) if member.isreg() else None)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("../escaped.json", {}),
        ("/tmp/escaped.json", {}),
        ("model/../../escaped.json", {}),
        ("state/step-1.pt", {}),
        ("model/pytorch_model.bin", {}),
        ("model/modeling_own.py", {}),
        ("model/config.json", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd", "size": 0}),
        ("chain/device.json.gz", {"type": tarfile.CHRTYPE, "size": 0}),
    ],
)
async def test_files_that_no_pack_has_are_refused(
    packed: Path, tmp_path: Path, name: str, fields: dict[str, Any]
) -> None:
    unsafe = rewrite(packed, tmp_path / "pack", lambda archive: add(archive, name, **fields))
    with pytest.raises(BadRequest, match="not a file of a packed run"):
        await replay(unsafe, last=1)


@pytest.mark.parametrize(
    ("file", "value", "key"),
    [
        ("config.json", {"auto_map": {"AutoModelForCausalLM": "own.Model"}}, "auto_map"),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["own.T", None]}}, "auto_map"),
        ("config.json", {"_attn_implementation": "author/kernel"}, "_attn_implementation"),
    ],
)
async def test_a_packed_model_that_names_code_is_refused(
    packed: Path, tmp_path: Path, file: str, value: dict[str, Any], key: str
) -> None:
    data = json.dumps(value).encode()
    unsafe = rewrite(packed, tmp_path / "pack", lambda own: add(own, f"model/{file}", data))
    with pytest.raises(BadRequest, match=f"{file} of the packed model has '{key}'"):
        await replay(unsafe, last=1)


async def test_an_exchanged_model_is_found_by_its_digest(packed: Path, tmp_path: Path) -> None:
    data = b'{"eos_token_id": 1}'
    exchanged = rewrite(
        packed, tmp_path / "pack", lambda own: add(own, "model/generation_config.json", data)
    )
    outcome = await replay(exchanged, last=1)
    assert (outcome.differences[0].what, outcome.differences[0].where) == (
        "model file", "generation_config.json",
    )  # fmt: skip


async def test_a_pack_without_its_model_needs_a_directory_with_it(
    recorded: Path, tmp_path: Path
) -> None:
    def elsewhere(record: dict[str, Any], _: dict[str, Any]) -> None:
        if record["kind"] == "start":
            record["config"]["model"] = "/models/of/the/author"

    run = altered(recorded, tmp_path / "run", elsewhere)
    written = write_pack(run, tmp_path / "pack", with_model=False)
    assert "model.safetensors" in written.left_out
    with pytest.raises(BadRequest, match=r"packed without its model, .*--model"):
        await replay(tmp_path / "pack", last=1)
    assert (await audit(tmp_path / "pack", chain_only=True)).held


async def test_a_directory_that_a_pack_names_as_teacher_is_not_loaded(
    recorded: Path, tmp_path: Path
) -> None:
    def with_teacher(record: dict[str, Any], _: dict[str, Any]) -> None:
        if record["kind"] == "start":
            record["config"]["loss"]["kind"] = "forward_kl"
            record["config"]["teacher"]["path"] = "/some/directory"

    write_pack(altered(recorded, tmp_path / "run", with_teacher), tmp_path / "pack")
    with pytest.raises(BadRequest, match="local teacher '/some/directory', which is not packed"):
        await replay(tmp_path / "pack", last=1)


async def test_a_file_that_is_no_pack_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"no archive")
    with pytest.raises(BadRequest, match="is not a pack of a run"):
        await replay(tmp_path / "file")
