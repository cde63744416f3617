"""What the compiler for Hopper makes of exact kernels, which no interpreter shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_every_dot_takes_its_terms_in_the_same_order(tmp_path: Path) -> None:
    """Where a thread holds four neighbouring terms instead of two, the matrix units get them in
    another order: a token's attention differed from a prompt's in one of 50,000 numbers."""
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    env.pop("TRITON_INTERPRET", None)
    run = subprocess.run(
        [sys.executable, "-m", "tests.engine.cuda.compiled"],
        cwd=Path(__file__).parents[3],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found = dict(json.loads(line) for line in run.stdout.splitlines())
    assert len(found) == 6
    for name, widths in found.items():
        assert set(widths) == {"2"}, (name, widths)
