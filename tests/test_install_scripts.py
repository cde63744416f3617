"""The scripts that install environments recover from a venv whose creation was interrupted."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parent.parent / "scripts").glob("install-*.sh"))
CREATES = re.compile(r"^ *(.+ -m venv .+)$", re.MULTILINE)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_venv_without_pip_is_created_again(script: Path, tmp_path: Path) -> None:
    lines = CREATES.findall(script.read_text())
    assert lines
    for at, line in enumerate(lines):
        where = tmp_path / str(at)
        where.mkdir()
        recorded = where / "recorded"
        python = where / "python"
        python.write_text(f'#!/bin/sh\necho "$@" >>{recorded}\n')
        python.chmod(0o700)
        # A python that starts and has no pip, which is what an interruption leaves.
        for name in (".venv-broken", ".venv-tinker"):
            broken = where / name / "bin" / "python"
            broken.parent.mkdir(parents=True)
            broken.write_text("#!/bin/sh\nexit 1\n")
            broken.chmod(0o700)
        own = where / ".venv" / "bin" / "python"
        own.parent.mkdir(parents=True)
        own.symlink_to(python)
        names = f"venv=.venv-broken VENV=.venv-broken python={python} PYTHON={python}"
        subprocess.run(["bash", "-euc", f"{names}; {line}"], cwd=where, check=True)
        assert "-m venv --clear .venv-" in recorded.read_text(), line
