"""The chain of a run: what was written is found, and what was altered is named."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from lockstep.chain.records import CHAIN, FORMAT, Chain, ChainWriter, canonical, last_recorded_step
from lockstep.chain.signing import check_signatures, load_signer
from lockstep.tokens.errors import BadRequest, NotFound


def written(directory: Path, steps: int = 3, **options: object) -> ChainWriter:
    writer = ChainWriter(directory, **options)  # type: ignore[arg-type]
    writer.append("start", 0, format=FORMAT)
    for step in range(1, steps + 1):
        file = writer.write_file(f"step-{step}.json.gz", b'{"reward":%d}' % step)
        writer.append("step", step, file=file)
    return writer


def edit(path: Path, before: str, after: str) -> None:
    path.write_text(path.read_text().replace(before, after))


def key_file(directory: Path) -> Path:
    path = directory / "key.pem"
    key = Ed25519PrivateKey.generate()
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return path


def test_records_follow_each_other_and_vouch_for_their_files(tmp_path: Path) -> None:
    written(tmp_path)
    chain = Chain.read(tmp_path)
    assert chain.breaks == ()
    assert list(chain.steps) == [1, 2, 3]
    assert chain.contents(chain.steps[2]["file"]) == {"reward": 2}
    assert last_recorded_step(tmp_path) == 3


def test_an_altered_record_is_found_at_the_next_one(tmp_path: Path) -> None:
    written(tmp_path)
    edit(tmp_path / CHAIN, '"step":1}', '"step":1,"reward":9}')
    (problem,) = Chain.read(tmp_path).breaks
    assert "line 3 of chain.jsonl (step 2) does not follow line 2" in problem


def test_a_removed_record_is_found(tmp_path: Path) -> None:
    written(tmp_path)
    lines = (tmp_path / CHAIN).read_text().splitlines(keepends=True)
    (tmp_path / CHAIN).write_text("".join(lines[:2] + lines[3:]))
    assert "does not follow" in Chain.read(tmp_path).breaks[0]


def test_an_altered_file_is_named(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "chain" / "step-2.json.gz").write_bytes(gzip.compress(b'{"reward":9}'))
    chain = Chain.read(tmp_path)
    with pytest.raises(BadRequest, match=r"step-2\.json\.gz was altered"):
        chain.contents(chain.steps[2]["file"])
    (tmp_path / "chain" / "step-3.json.gz").unlink()
    with pytest.raises(BadRequest, match=r"step-3\.json\.gz cannot be read"):
        chain.contents(chain.steps[3]["file"])


def test_a_line_that_a_killed_trainer_left_incomplete_is_no_record(tmp_path: Path) -> None:
    written(tmp_path)
    with open(tmp_path / CHAIN, "ab") as file:
        file.write(b'{"kind":"st')
    assert Chain.read(tmp_path).breaks == ()
    dropped = ChainWriter(tmp_path).rewind(3)
    assert dropped == []
    ChainWriter(tmp_path).append("end", 3)
    chain = Chain.read(tmp_path)
    assert chain.breaks == ()
    assert chain.links[-1].kind == "end"


def test_a_resumed_run_goes_on_from_its_step_and_names_what_it_dropped(tmp_path: Path) -> None:
    written(tmp_path)
    digest = Chain.read(tmp_path).head
    writer = ChainWriter(tmp_path)
    assert writer.rewind(2) == [{"kind": "step", "step": 3, "digest": digest}]
    writer.append("resume", 2)
    chain = Chain.read(tmp_path)
    assert chain.breaks == ()
    assert [link.kind for link in chain.links] == ["start", "step", "step", "resume"]


def test_a_directory_without_a_chain_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"has no chain\.jsonl"):
        Chain.read(tmp_path)
    (tmp_path / CHAIN).write_bytes(canonical({"kind": "step", "step": 1}) + b"\n")
    with pytest.raises(BadRequest, match="does not start with"):
        Chain.read(tmp_path)


def test_numbers_that_json_does_not_have_are_written_as_text() -> None:
    assert canonical({"b": float("nan"), "a": [1.5]}) == b'{"a":[1.5],"b":"nan"}'


def test_signatures_hold_for_one_key_only(tmp_path: Path) -> None:
    sign, public = load_signer(key_file(tmp_path))
    writer = ChainWriter(tmp_path, sign)
    writer.append("start", 0, format=FORMAT, public_key=public)
    writer.append("step", 1, reward=0.5)
    chain = Chain.read(tmp_path)
    assert check_signatures(chain) == check_signatures(chain, public) == []
    _, other = load_signer(key_file(tmp_path))
    assert "names the public key" in check_signatures(chain, other)[0]
    # A forger can link records anew, but cannot sign them.
    edit(tmp_path / CHAIN, '"reward":0.5', '"reward":0.9')
    assert "line 2 (step 1) is not signed by" in check_signatures(Chain.read(tmp_path))[0]


def test_a_key_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_text("no key")
    with pytest.raises(BadRequest, match="is not a private key"):
        load_signer(tmp_path / "key.pem")
    with pytest.raises(BadRequest, match="cannot be read"):
        load_signer(tmp_path / "absent.pem")
