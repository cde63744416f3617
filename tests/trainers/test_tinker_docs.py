"""The page about Tinker does what it says, with the SDK and the cookbook as a reader has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import RUN, blocks
from tests.docs.page_runner import reading
from tests.trainers.tinker_server import PYTHON

pytestmark = pytest.mark.timeout(600)


def test_the_page_does_what_it_says(tmp_path: Path) -> None:
    every = blocks("docs/tinker.md")
    chosen = [block for block in every if block.language in RUN and block.reason is None]
    with reading(tmp_path) as reader:
        for at, block in enumerate(chosen):
            reader.run(block)
            if at == 0:  # the server is up; the rest is for the other terminal
                reader.environ["PATH"] = f"{PYTHON.parent}:{reader.environ['PATH']}"
    assert {block.needs for block in chosen} == {None, "tinker"}
