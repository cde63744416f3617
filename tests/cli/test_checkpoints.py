"""`lockstep checkpoints show` says what a checkpoint holds and who wrote it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.tokens.errors import CheckpointError
from tests.checkpoint import slices_on_disk, weights_on_disk


def test_show_names_the_ranks_of_a_sliced_checkpoint(tmp_path: Path) -> None:
    arrays = weights_on_disk.tensors()
    path = slices_on_disk.write(tmp_path / "c", arrays, slices_on_disk.rows_of(arrays, 3))
    shown = CliRunner().invoke(app, ["checkpoints", "show", str(path)])
    assert shown.exit_code == 0, shown.output
    assert "sliced checkpoint, version 7" in shown.output
    assert "4 tensors (4 F32), 1,056 bytes" in shown.output
    result = CliRunner().invoke(app, ["checkpoints", "show", str(path), "--json"])
    facts = json.loads(result.stdout)
    assert [row["rank"] for row in facts["ranks"]] == [0, 1, 2]
    assert sum(row["bytes"] for row in facts["ranks"]) == facts["bytes"] == 1056
    assert facts["manifest"] is True


def test_show_of_a_whole_checkpoint_has_no_ranks(tmp_path: Path) -> None:
    path = weights_on_disk.write(tmp_path / "c")
    facts = json.loads(CliRunner().invoke(app, ["checkpoints", "show", str(path), "--json"]).stdout)
    assert (facts["form"], facts["ranks"], facts["probe_tokens"]) == ("whole", [], 0)
    assert "no probe" in CliRunner().invoke(app, ["checkpoints", "show", str(path)]).output


def test_show_names_what_is_missing(tmp_path: Path) -> None:
    arrays = weights_on_disk.tensors()
    path = slices_on_disk.write(tmp_path / "c", arrays, slices_on_disk.rows_of(arrays, 2))
    (path / "rank-00001.json").unlink()
    result = CliRunner().invoke(app, ["checkpoints", "show", str(path)])
    with pytest.raises(CheckpointError, match="rank 1 of 2"):
        raise result.exception or AssertionError(result.output)
