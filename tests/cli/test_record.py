"""`lockstep record` at a real gateway: the program's calls are one session, shown as a tree."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.render import Renderer
from tests.processes import TOKEN, ServeProcess

PROGRAM = """
import json, os, sys, urllib.request

def ask(history):
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": history}).encode()
    headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
               "content-type": "application/json"}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

assert "LOCKSTEP_ADMIN_TOKEN" not in os.environ
first = {"role": "user", "content": sys.argv[1]}
reply = ask([first])
ask([first, {"role": "assistant", "content": reply["content"]}, {"role": "user", "content": "two"}])
ask([first, {"role": "assistant", "content": "edited"}, {"role": "user", "content": "three"}])
print(reply["content"])
raise SystemExit(3)
"""
SCRIPT = [{"when": {"turn": 0}, "say": "First."}, {"say": "And then."}]
KEY = "a-key-of-the-gateway"
TINY = Renderer.load("tiny")


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """A gateway that demands keys, with a scripted worker."""
    script = tmp_path_factory.mktemp("script") / "script.jsonl"
    script.write_text("\n".join(map(json.dumps, SCRIPT)))
    process = ServeProcess(
        "--sessions", "memory", "--worker-args", f"--script {script}", LOCKSTEP_API_KEYS=KEY
    )
    yield process
    process.stop()


def record(gateway: ServeProcess, *arguments: str) -> subprocess.Popen[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("LOCKSTEP_")}
    return subprocess.Popen(
        [sys.executable, "-m", "lockstep", "record", *arguments],
        env={**clean, "LOCKSTEP_ADMIN_URL": gateway.admin_url, "LOCKSTEP_ADMIN_TOKEN": TOKEN,
             "MINE": KEY},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


@pytest.fixture
def program(tmp_path: Path) -> str:
    (tmp_path / "agent.py").write_text(PROGRAM)
    return str(tmp_path / "agent.py")


def test_a_program_is_recorded_and_its_branches_are_shown(
    gateway: ServeProcess, program: str
) -> None:
    """With a key for this session only, which the gateway mints."""
    process = record(gateway, "--session", "mine", "--", sys.executable, program, "one")
    output, errors = process.communicate(timeout=120)
    # What the program printed and its exit code are what they would be without the recording.
    assert (output, process.returncode) == ("First.\n", 3), errors
    first, second = (len(TINY.encode(f"{rule['say']}<|im_end|>")) for rule in SCRIPT)
    both, three = first + second, first + 2 * second
    agent = "3 turns of Python-urllib"
    assert f"mine: {agent}, {three} tokens sampled, {three} trainable" in errors
    assert f"main 2 turns, {both} sampled, {both} trainable" in errors
    assert "break before turn 2: edited_history" in errors
    assert f"{gateway.admin_url}/dashboard#code=" in errors
    assert "lockstep export samples mine --output mine.jsonl" in errors


def test_a_session_is_continued_with_a_key_of_the_caller(
    gateway: ServeProcess, program: str
) -> None:
    for turns in (3, 6):
        command = ("--session", "twice", "--api-key-env", "MINE", "--json", "--")
        process = record(gateway, *command, sys.executable, program, f"begin {turns}")
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 3, errors
        summary = json.loads(output.splitlines()[-1])
        assert sum(branch["turns"] for branch in summary["branches"]) == turns
        assert summary["breaks"]["edited_history"] == turns // 3


def test_an_interrupt_ends_the_program_and_not_the_report(
    gateway: ServeProcess, tmp_path: Path
) -> None:
    waiting = "import signal; print('ready', flush=True); signal.pause()"
    process = record(gateway, "--", sys.executable, "-c", waiting)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "has no turns: no request of the command was answered" in errors
    assert "The model's context is 131,072 tokens" in errors


def test_an_error_names_the_way_out(gateway: ServeProcess) -> None:
    process = record(gateway, "--api-key-env", "MINE", "--model", "large", "--", "true")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "model is 'large': the gateway serves tiny" in errors
