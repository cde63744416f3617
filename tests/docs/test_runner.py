"""The runner of the documentation notices what a reader would notice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import Block
from tests.docs.page_runner import DocumentationError, reading


def block(language: str, text: str) -> Block:
    return Block("page.md", 1, language, text)


def test_commands_are_joined_and_split_as_a_shell_would() -> None:
    text = (
        "$ curl a \\\n    -d '{\n}'\nexport A=1   # don't\n\n"
        "$ lockstep serve tiny &\ncat <<END > x\n a\nEND"
    )
    assert list(block("console", text).commands()) == [
        "curl a \\\n    -d '{\n}'",
        "export A=1   # don't",
        "lockstep serve tiny",
        "cat <<END > x\n a\nEND",
    ]


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("console", "false"),
        ("console", "cat missing | wc -l"),
        ("console", "curl http://127.0.0.1:9001/"),
        ("console", "lockstep serve no-such-model"),
        ("console", "lockstep state --no-such-option"),
        ("console", "pip install 'lockstep-rl[nothing]'"),
        ("console", "make no-such-target"),
        ("python", "1 / 0"),
        ("python", "async def f(): raise ValueError\nawait f()"),
        ("python", "import os; os._exit(0)"),
    ],
)
def test_what_fails_is_reported_with_its_place(language: str, text: str, tmp_path: Path) -> None:
    with reading(tmp_path) as reader, pytest.raises(DocumentationError, match=r"page\.md:1"):
        reader.run(block(language, text))


def test_variables_directories_and_names_hold_for_the_rest_of_a_page(tmp_path: Path) -> None:
    with reading(tmp_path) as reader:
        reader.run(block("console", "mkdir inner; cd inner\nsecret=s3cret"))
        reader.run(block("console", 'test "$(basename $PWD)" = inner\ntest "$secret" = s3cret'))
        reader.run(block("python", "import os\nsecret = os.environ['secret']"))
        reader.run(block("python", "assert secret == 's3cret'"))


SCRIPT = """#!/bin/sh
echo Ready: $*
trap 'exit 0' INT
while sleep 0.1; do :; done
"""


def test_a_server_ends_with_its_page_or_when_another_takes_its_port(tmp_path: Path) -> None:
    with reading(tmp_path) as reader:
        script = reader.directory / "lockstep"
        script.write_text(SCRIPT)
        script.chmod(0o755)
        reader.run(block("console", "./lockstep worker a --port 8000"))
        reader.run(block("console", "./lockstep worker b --port 8100 &"))
        first, second = reader.servers
        reader.run(block("console", "./lockstep serve c"))
        assert reader.ports["8000"] in reader.servers[-1].command
        assert (first.process.poll(), second.process.poll()) == (0, None)
        third = reader.servers[-1]
    assert (second.process.poll(), third.process.poll()) == (0, 0)
