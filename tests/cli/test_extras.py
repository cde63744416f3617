"""A base install has no torch: commands that need more say which extra, and the line to run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.cli.extras import missing_extra

WITHOUT = """
import sys
blocked = sys.argv[1].split(",")
class Without:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Without())
sys.argv[0:2] = ["lockstep"]
from lockstep.cli import main
main()
"""
CONFIG = """
model = "tiny"
[env]
name = "reverse"
"""


def lockstep_without(modules: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command in a Python that does not find those modules."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("LOCKSTEP_")}
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, modules, *arguments],
        capture_output=True, text=True, timeout=120, env=clean, cwd=cwd, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "command",
    [
        ("worker", "tiny"),
        ("serve", "tiny", "--port", "0", "--admin-port", "0"),
        ("train", "run.toml"),
        ("demo",),
    ],
    ids=lambda command: command[0],
)
def test_a_command_that_needs_the_engine_says_what_to_install(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    process = lockstep_without("torch,safetensors", *command, cwd=tmp_path)
    assert process.returncode == 2, process.stderr
    assert "Traceback" not in process.stderr
    (line,) = [line for line in process.stderr.splitlines() if "error" in line]
    assert f"lockstep {command[0]} needs " in line
    extra = "train" if command[0] in ("train", "demo") else "engine"
    assert line.endswith(f"pip install 'lockstep-rl[{extra}]'")
    assert not list(tmp_path.glob("**/*.sqlite"))


@pytest.mark.parametrize("command", [("version",), ("--help",), ("check", "--help")])
def test_the_rest_works_without_it(command: tuple[str, ...], tmp_path: Path) -> None:
    process = lockstep_without("torch,safetensors,peft", *command, cwd=tmp_path)
    assert (process.returncode, process.stderr) == (0, "")


def test_a_module_of_no_extra_is_not_explained_away() -> None:
    assert missing_extra(ModuleNotFoundError(name="lockstep.gone"), "lockstep serve") is None
    message = missing_extra(ModuleNotFoundError(name="torch.nn"), "lockstep worker")
    assert message is not None
    assert "lockstep-rl[engine]" in message
