"""`lockstep train` as a command: a custom environment, the log, Ctrl-C, a full disk."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from tests.processes import TOKEN
from tests.train.conftest import Stack

TASK = """
from lockstep.train import Reward, Task

class Digits:
    def tasks(self, split, seed):
        while True:
            for digit in "05" if split == "eval" else "12346789":
                yield Task(({"role": "user", "content": "Reverse: " + digit},), facts={"is": digit})

    async def rollout(self, task, context):
        turn = await context.chat(task).send(task.messages[0]["content"])
        solved = turn.text.strip() == task.facts["is"]
        return Reward(float(solved), solved)
"""
RUN = """
run_dir = "{run_dir}"
[serve]
url = "{url}"
admin_url = "{admin_url}"
admin_token = "{token}"
[env]
name = "{env}"
[rollout]
groups = 4
group_size = 4
max_tokens = 8
[loop]
steps = {steps}
[eval]
prompts = 2
"""


def command(
    stack: Stack, where: Path, *arguments: str, env: str = "digits:Digits", steps: int = 2,
    run_dir: str = "run",
) -> subprocess.Popen[str]:  # fmt: skip
    """Run the installed command: its sys.path does not start with the working directory."""
    (where / "digits.py").write_text(TASK)
    served = {"url": stack.process.url, "admin_url": stack.process.admin_url, "token": TOKEN}
    (where / "run.toml").write_text(RUN.format(run_dir=run_dir, env=env, steps=steps, **served))
    lockstep = Path(sys.executable).with_name("lockstep")
    return subprocess.Popen(
        [lockstep, "train", "run.toml", *arguments], cwd=where, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=_heed_ctrl_c,
    )  # fmt: skip


def _heed_ctrl_c() -> None:
    """Restore SIGINT, which a shell ignores for background commands, such as these tests."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_an_environment_in_the_working_directory_is_trained_on_and_steps_are_logged(
    stack: Stack, tmp_path: Path
) -> None:
    out, errors = command(stack, tmp_path).communicate(timeout=120)
    assert "step 1/2  reward" in out, errors
    assert "step 2/2  reward" in out, errors
    assert "report.html shows the run" in out
    assert "step-2" in (tmp_path / "run" / "report.html").read_text()


def test_ctrl_c_prints_how_to_resume_and_the_run_resumes(stack: Stack, tmp_path: Path) -> None:
    process = command(stack, tmp_path, steps=400)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.startswith("Stopped; `lockstep train run.toml --resume` continues"), errors
    steps = len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    change = ("--change", "learner.lr=2e-4")
    resumed = command(stack, tmp_path, "--resume", *change, steps=steps + 1)
    out, errors = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, errors
    assert f"step {steps + 1}/{steps + 1}  reward" in out
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").open()]
    (changed,) = (event for event in events if event["kind"] == "change")
    assert (changed["field"], changed["before"], changed["now"]) == ("learner.lr", 1e-4, 2e-4)
    refused = command(stack, tmp_path, "--resume", steps=steps + 2)
    _, errors = refused.communicate(timeout=120)
    assert refused.returncode != 0
    assert (
        f"learner.lr is 0.0001, but the run in {tmp_path / 'run'} has 0.0002: restore it" in errors
    )
    assert "pass --change learner.lr=0.0001" in errors


def test_a_run_directory_that_cannot_be_created_is_a_one_line_error(
    stack: Stack, tmp_path: Path
) -> None:
    process = command(stack, tmp_path, run_dir="/dev/null/run")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert errors.startswith("error (disk): Not a directory: /dev/null/run"), errors


def test_a_full_disk_is_a_one_line_error_that_can_be_retried(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "samples.jsonl").symlink_to("/dev/full")
    process = command(stack, tmp_path)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 75
    assert errors.startswith("error (disk): No space left on device"), errors
    assert "--resume` continues" in errors
