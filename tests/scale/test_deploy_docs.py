"""The page about deployments does what it says, with a real PostgreSQL and a real Ray."""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, Block, blocks
from tests.docs.page_runner import reading
from tests.scale.postgres_server import PostgresServer
from tests.scale.test_scale_docs import SHOWN

EXAMPLE = "python examples/ray/fleet.py"


def needing(what: str) -> list[Block]:
    chosen = [block for block in blocks("docs/deploy.md") if block.needs == what]
    assert chosen, f"no block of the page needs {what}"
    return chosen


def test_several_gateways(tmp_path: Path, postgres: PostgresServer) -> None:
    place = f"127.0.0.1:{postgres.port}/postgres?schema=deploy"
    with reading(tmp_path) as reader:
        for block in needing("postgres"):
            reader.run(replace(block, text=block.text.replace(SHOWN, place)))


@pytest.mark.timeout(300)
def test_workers_of_ray(tmp_path: Path) -> None:
    home = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # short: Ray puts sockets below it
    program = f"{ROOT / '.venv-scale/bin/python'} examples/ray/fleet.py --python {sys.executable}"
    try:
        with reading(tmp_path) as reader:
            reader.environ |= {"RAY_TMPDIR": str(home), "RAY_USAGE_STATS_ENABLED": "0"}
            for block in needing("ray"):
                assert EXAMPLE in block.text
                reader.run(replace(block, text=block.text.replace(EXAMPLE, program)))
    finally:
        shutil.rmtree(home, ignore_errors=True)
