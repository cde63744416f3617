"""Every command and Python block of README and docs/ does what its page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import RUN, SHOWN, Block, blocks, loose_commands, pages
from tests.docs.page_runner import reading

MOST_NOT_RUN = 8
ENGINES = ("vllm", "dynamo")


def runnable(page: str) -> list[Block]:
    return [
        block
        for block in blocks(page)
        if block.language in RUN and block.needs is None and block.reason is None
    ]


@pytest.mark.parametrize("page", [page for page in pages() if runnable(page)])
def test_a_page_does_what_it_says(page: str, tmp_path: Path) -> None:
    with reading(tmp_path) as reader:
        for block in runnable(page):
            reader.run(block)


def test_every_block_says_what_it_is() -> None:
    for block in (block for page in pages() for block in blocks(page)):
        assert block.language in RUN + SHOWN, f"{block.place} is a block of {block.language!r}"
        assert block.needs in (None, *ENGINES), f"{block.place} needs {block.needs!r}"


def test_commands_are_in_blocks_that_are_run() -> None:
    assert [line for page in pages() for line in loose_commands(page)] == []


def test_few_blocks_are_only_shown() -> None:
    shown = [b for page in pages() for b in blocks(page) if b.language in RUN and b.reason]
    assert len(shown) <= MOST_NOT_RUN, "\n".join(f"{b.place}: {b.reason}" for b in shown)
