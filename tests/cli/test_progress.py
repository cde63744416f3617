"""Progress of long work: on a terminal it is shown, elsewhere there is not one byte of it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lockstep.progress import Progress
from tests.export.samples import two_turns
from tests.processes import ServeProcess

WORK = """
import time
from lockstep.progress import Progress
with Progress("Counting", {total}) as progress:
    for at in progress.each(range(3)):
        time.sleep(0.15)
print("done")
"""


def on_a_terminal(command: list[str], **environ: str) -> tuple[int, str, str]:
    """Exit code, stdout (a file), and what a terminal on stderr was sent."""
    ours, theirs = pty.openpty()
    with tempfile.TemporaryFile() as written:
        process = subprocess.Popen(
            command, stdout=written, stderr=theirs, stdin=theirs,
            env={**os.environ, "TERM": "xterm", **environ},
        )  # fmt: skip
        os.close(theirs)
        shown = b"".join(iter(lambda: _read(ours), b""))
        os.close(ours)
        code = process.wait(60)
        written.seek(0)
        return code, written.read().decode(), shown.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the other side was closed
        return b""


@pytest.mark.parametrize(("total", "counted"), [("3", "3/3"), ("None", "Counting: 3")])
def test_a_terminal_shows_it_and_stdout_is_untouched(total: str, counted: str) -> None:
    script = WORK.format(total=total)
    code, out, shown = on_a_terminal([sys.executable, "-c", script])
    assert code == 0
    assert out == "done\n"
    assert "Counting" in shown
    assert counted in shown


def test_without_a_terminal_nothing_is_said_and_rich_is_not_imported() -> None:
    script = WORK.format(total=3) + "import sys; print('rich' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("done\nFalse\n", "")


def test_what_is_not_to_be_shown_is_not_shown_on_a_terminal_either() -> None:
    script = (
        "from lockstep.progress import Progress\n"
        "with Progress('Counting', 2, visible=False) as bar: bar.advance(); bar.say('x')"
    )
    assert on_a_terminal([sys.executable, "-c", script]) == (0, "", "")


def test_it_ends_with_the_error_of_its_block(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="broken"), Progress("Counting"):
        raise ValueError("broken")
    assert capfd.readouterr() == ("", "")


def test_an_export_shows_it_on_a_terminal_only(tmp_path: Path) -> None:
    stored = tmp_path / "samples.jsonl"
    stored.write_bytes(b"".join(two_turns(seed).to_json() + b"\n" for seed in range(400)))
    command = [sys.executable, "-m", "lockstep", "export", "samples", str(stored)]
    code, out, shown = on_a_terminal(command)
    assert code == 0, shown
    assert out.encode() == stored.read_bytes()
    assert "Exporting samples" in shown
    piped = subprocess.run(command, capture_output=True, check=True, timeout=60)
    assert (piped.stdout, piped.stderr) == (stored.read_bytes(), b"")


def test_an_update_shows_it_on_a_terminal_unless_json_is_wanted() -> None:
    served = ServeProcess("--sessions", "memory", "--worker-args", "--max-model-len 256")
    try:
        command = [sys.executable, "-m", "lockstep", "update-weights", "tiny", "--url",
                   served.admin_url]  # fmt: skip
        environ = {"LOCKSTEP_ADMIN_TOKEN": "test-admin-token"}
        _, _, shown = on_a_terminal(command, **environ)
        assert "Running the operation" in shown
        _, _, shown = on_a_terminal([*command, "--json"], **environ)
        assert "Running the operation" not in shown
    finally:
        served.stop()
