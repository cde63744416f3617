"""The page about several gateways does what it says, on a real PostgreSQL."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.docs.blocks import RUN, blocks
from tests.docs.page_runner import reading
from tests.scale.postgres_server import PostgresServer

SHOWN = "127.0.0.1:5432/lockstep"


@pytest.mark.timeout(300)
def test_the_page_does_what_it_says(tmp_path: Path, postgres: PostgresServer) -> None:
    chosen = [block for block in blocks("docs/scale.md") if block.language in RUN]
    with reading(tmp_path) as reader:
        for block in chosen:
            if block.needs == "postgres":
                place = f"127.0.0.1:{postgres.port}/postgres"
                reader.run(replace(block, text=block.text.replace(SHOWN, place)))
