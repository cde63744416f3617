"""Audits check the chain, repeat a random part of a run, and leave their marks in it."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lockstep.chain.records import CHAIN, Chain, ChainWriter
from lockstep.chain.signing import load_signer
from lockstep.replay import audit
from lockstep.tokens.errors import BadRequest
from tests.chain.test_records import key_file
from tests.replay.conftest import STEPS, altered, command


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "run"))


@pytest.mark.exact_arithmetic
async def test_chosen_steps_and_draws_are_repeated_and_marked(run: Path) -> None:
    outcome = await audit(run, fraction=0.2, draws=0.5, seed=4)
    assert outcome.held
    assert outcome.problems == []
    assert outcome.missing == {}
    assert outcome.replay is not None
    assert outcome.replay.steps == outcome.chosen
    assert len(outcome.chosen) == 2
    assert 0 < outcome.replay.draws < len(outcome.chosen) * 16
    again = await audit(run, fraction=0.2, draws=0.5, seed=4, chain_only=True)
    assert again.chosen == []
    marks = [json.loads(line) for line in (run / "audits.jsonl").open()]
    digests = {link.step: link.digest for link in Chain.read(run).links if link.kind == "step"}
    assert marks[0]["steps"] == [
        {"step": step, "digest": digests[step], "held": True} for step in outcome.chosen
    ]
    assert [mark["mode"] for mark in marks] == ["bits", "chain"]


async def test_the_seed_decides_what_is_chosen(run: Path) -> None:
    from lockstep.replay.auditing import choose_steps

    chain = Chain.read(run)
    assert choose_steps(chain, 0.3, 1) == choose_steps(chain, 0.3, 1)
    assert len({tuple(choose_steps(chain, 0.3, seed)) for seed in range(20)}) > 5
    assert choose_steps(chain, 0.01, 1) != []
    assert choose_steps(chain, 1.0, 1) == list(range(1, STEPS + 1))
    with pytest.raises(BadRequest, match="fraction is 0: expected more than 0"):
        await audit(run, fraction=0)


async def test_an_altered_file_a_missing_record_and_an_edited_digest_are_found(
    run: Path, tmp_path: Path
) -> None:
    path = run / "chain" / "step-3.json.gz"
    data = json.loads(gzip.decompress(path.read_bytes()))
    data["groups"][0]["rollouts"][0]["reward"]["value"] = 5.0
    path.write_bytes(gzip.compress(json.dumps(data).encode()))
    outcome = await audit(run)
    assert not outcome.held
    assert outcome.replay is None  # a chain that does not hold is not worth computing
    assert "chain/step-3.json.gz was altered" in outcome.problems[0]

    lines = (run / CHAIN).read_text().splitlines(keepends=True)
    (run / CHAIN).write_text("".join(lines[:4] + lines[5:]))
    outcome = await audit(run, chain_only=True)
    assert any("does not follow" in own for own in outcome.problems)
    assert "step 4 has no record" in outcome.problems

    def other_weights(record: dict[str, Any], _: dict[str, Any]) -> None:
        if record["step"] == STEPS and record["kind"] == "step":
            record["learning"]["weights"] = "sha256:" + "0" * 32

    shutil.copytree(tmp_path / "run", tmp_path / "spare")
    forged = altered(tmp_path / "run", tmp_path / "forged", other_weights)
    outcome = await audit(forged, chain_only=True)
    assert f"step {STEPS}: the digests of its weights are not those of its record" in (
        outcome.problems
    )
    assert any("holds other weights than its record" in own for own in outcome.problems)


async def test_signatures_are_checked_with_the_expected_key(run: Path, tmp_path: Path) -> None:
    sign, public = load_signer(key_file(tmp_path))
    links = Chain.read(run).links
    (run / CHAIN).unlink()
    writer = ChainWriter(run, sign)
    for link in links:
        body = {k: v for k, v in link.record.items() if k not in ("kind", "step", "previous")}
        key = {"public_key": public} if link.kind == "start" else {}
        writer.append(link.kind, link.step, **body, **key)
    outcome = await audit(run, chain_only=True, key=public)
    assert outcome.held
    assert any("the expected key" in line for line in outcome.lines())
    _, other = load_signer(key_file(tmp_path))
    assert not (await audit(run, chain_only=True, key=other)).held


async def test_a_run_without_a_signature_does_not_pass_for_a_signed_one(run: Path) -> None:
    outcome = await audit(run, chain_only=True, key="00" * 32)
    assert outcome.problems == [f"the run is not signed, but the key {'00' * 8} was expected"]


async def test_links_that_a_trainer_did_not_record_are_listed(run: Path, tmp_path: Path) -> None:
    def no_gradients(record: dict[str, Any], _: dict[str, Any]) -> None:
        record.pop("learning", None)

    partial = altered(run, tmp_path / "partial", no_gradients)
    outcome = await audit(partial, chain_only=True)
    assert outcome.missing == {
        f"learning.{name}": STEPS for name in ("metrics", "gradients", "optimizer", "weights")
    }
    assert f"Missing link: learning.gradients (in {STEPS} records)." in list(outcome.lines())
    with pytest.raises(BadRequest, match=r"cannot be repeated: .* lack learning\.metrics"):
        await audit(partial)


def test_the_command_exits_with_1_for_what_does_not_hold(run: Path) -> None:
    held = command("audit", str(run), "--chain-only", "--json")
    assert held.returncode == 0, held.stderr
    assert json.loads(held.stdout)["held"] is True
    (run / "chain" / "tensors-2.json.gz").unlink()
    broken = command("audit", str(run), "--chain-only")
    assert broken.returncode == 1
    assert "DIFFERS: " in broken.stdout
    assert "tensors-2.json.gz cannot be read" in broken.stdout
