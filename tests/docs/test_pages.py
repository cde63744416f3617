"""What holds for the blocks of every page; test_quickstarts and test_guides run them."""

from __future__ import annotations

from tests.docs.blocks import ROOT, RUN, SHOWN, blocks, loose_commands, pages
from tests.docs.page_runner import RUN_ELSEWHERE

MOST_NOT_RUN = 9
# Never there when tests run.
ABSENT = ("needs a GPU", "needs a Ray cluster", "needs Docker", "needs Kubernetes",
          "needs Phoenix", "needs vLLM beside the SDK")  # fmt: skip
ENGINES = ("vllm", "sglang", "dynamo", "agents", "tinker", "trl", "verifiers", "postgres", "ray")


def test_commands_that_other_tests_run_are_run_there() -> None:
    for command, test in RUN_ELSEWHERE.items():
        assert f'"{command.split()[1]}"' in (ROOT / test).read_text()


def test_every_block_says_what_it_is() -> None:
    for block in (block for page in pages() for block in blocks(page)):
        assert block.language in RUN + SHOWN, f"{block.place} is a block of {block.language!r}"
        assert block.needs in (None, *ENGINES), f"{block.place} needs {block.needs!r}"


def test_commands_are_in_blocks_that_are_run() -> None:
    assert [line for page in pages() for line in loose_commands(page)] == []


def test_few_blocks_are_only_shown() -> None:
    shown = [
        b
        for page in pages()
        for b in blocks(page)
        if b.language in RUN and b.reason not in (None, *ABSENT)
    ]
    assert len(shown) <= MOST_NOT_RUN, "\n".join(f"{b.place}: {b.reason}" for b in shown)
