"""The runner of the documentation notices what a reader would notice."""

from __future__ import annotations

import subprocess
import sys
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import psutil
import pytest

from tests.docs.blocks import ROOT, Block
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


def test_an_answer_with_an_error_status_fails_its_command(tmp_path: Path) -> None:
    with reading(tmp_path) as reader:
        address = ("127.0.0.1", int(reader.ports["8000"]))
        with ThreadingHTTPServer(address, SimpleHTTPRequestHandler) as server:
            Thread(target=server.serve_forever, daemon=True).start()
            reader.run(block("console", "curl http://127.0.0.1:8000/"))
            with pytest.raises(DocumentationError, match="404"):
                reader.run(block("console", "curl http://127.0.0.1:8000/missing"))
            server.shutdown()


# Not a shell's: one that waits for its child in that moment may lose the signal.
SCRIPT = f"""#!{sys.executable}
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
print("Ready:", *sys.argv[1:], flush=True)
while True:
    time.sleep(0.1)
"""


KILLED = """
import sys, time
from pathlib import Path
from tests.docs.blocks import Block
from tests.docs.page_runner import reading
with reading(Path(sys.argv[1])) as reader:
    script = reader.directory / "lockstep"
    script.write_text(sys.argv[2])
    script.chmod(0o755)
    reader.run(Block("page.md", 1, "console", "./lockstep worker a --port 8000"))
    print(reader.servers[0].process.pid, flush=True)
    time.sleep(60)
"""


def test_a_run_that_is_killed_leaves_no_server(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path), SCRIPT]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        server = psutil.Process(int(run.stdout.readline()))
        run.kill()
    server.wait(5)


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
