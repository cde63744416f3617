"""Arguments and variables point each known agent at a session; no file of the user is changed."""

from __future__ import annotations

import json
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from lockstep.cli.running.agent_setup import AGENTS, SessionAddress, check_context, set_up
from lockstep.tokens.errors import BadRequest

SESSION = SessionAddress("http://127.0.0.1:8000/sessions/s", "a key", "tiny", 131_072)


@pytest.mark.parametrize(
    ("command", "agent"),
    [
        ("codex exec hi", "Codex"),
        ("/usr/local/bin/claude -p hi", "Claude Code"),
        ("npx -y @openai/codex@0.166.0 exec hi", "Codex"),
        ("npx @qwen-code/qwen-code hi", "Qwen Code"),
        ("uvx mini-swe-agent -t hi", "mini-swe-agent"),
        ("env A=1 opencode run hi", "opencode"),
        ("aider --message hi", "aider"),
        ("cline hi", "cline"),
        ("python -m codex", None),
        ("grep codex", None),
    ],
)
def test_an_agent_is_recognised_by_its_program(command: str, agent: str | None) -> None:
    words = command.split()
    setup = set_up(words, SESSION)
    assert setup.agent == agent
    # The command stays as it is; arguments only follow the program.
    rest = list(setup.command)
    assert [rest.pop(rest.index(word)) for word in words] == words
    assert setup.variables["OPENAI_BASE_URL"] == f"{SESSION.url}/v1"
    assert setup.variables["ANTHROPIC_BASE_URL"] == SESSION.url


def test_codex_gets_its_provider_as_toml() -> None:
    command = set_up(["codex", "exec", "hi"], SESSION).command
    assert (command[0], *command[-2:]) == ("codex", "exec", "hi")
    options = command[1:-2]
    assert set(options[::2]) == {"-c"}
    values = tomllib.loads("\n".join(options[1::2]))
    provider = values["model_providers"][values["model_provider"]]
    assert (provider["base_url"], provider["wire_api"]) == (SESSION.base_url, "responses")
    assert set_up(["codex"], SESSION).variables[provider["env_key"]] == SESSION.key
    assert (values["model"], values["model_context_window"]) == ("tiny", 131_072)


def test_what_the_user_chose_stays() -> None:
    setup = set_up(["qwen", "--auth-type", "anthropic", "hi"], SESSION)
    assert setup.command == ("qwen", "--auth-type", "anthropic", "hi")


@pytest.mark.parametrize("program", ["codex", "claude", "opencode", "qwen", "mini", "aider"])
def test_no_known_agent_needs_a_file(program: str) -> None:
    setup = set_up([program], SESSION)
    assert not setup.files
    named = json.dumps([*setup.command, *setup.variables.values()])
    assert "tiny" in named
    assert SESSION.url in named


def test_the_printed_command_runs_in_a_shell(tmp_path: Path) -> None:
    """With the files that it needs: cline reads its provider from one."""
    (tmp_path / "cline").write_text(
        '#!/bin/sh\ncat "$2/settings/providers.json"\necho "$3 $OPENAI_API_KEY"\n'
    )
    (tmp_path / "cline").chmod(0o755)
    text = set_up([str(tmp_path / "cline"), "it's"], SESSION).shell_text()
    done = subprocess.run(["sh", "-c", text], cwd=tmp_path, capture_output=True, check=True)
    stored, end = json.JSONDecoder().raw_decode(done.stdout.decode())
    provider = stored["providers"]["openai-compatible"]["settings"]
    assert (provider["baseUrl"], provider["model"]) == (SESSION.base_url, "tiny")
    assert done.stdout.decode()[end:] == "it's a key\n"


def test_an_agent_does_not_inherit_the_admin_token() -> None:
    setup = set_up(["codex"], SESSION)
    inherited = {"LOCKSTEP_ADMIN_TOKEN": "t", "ANTHROPIC_AUTH_TOKEN": "t", "PATH": "/bin"}
    environment = setup.environment(inherited)
    assert environment == {**setup.variables, "PATH": "/bin"}
    assert shlex.split(setup.shell_text())[0] == "env"


def test_an_agent_whose_first_prompt_cannot_fit_is_named_with_the_limit() -> None:
    with pytest.raises(BadRequest, match=r"Codex opens with about 8,300 tokens.*context is 4,096"):
        check_context("Codex", 4096)
    for agent in (None, *AGENTS):
        check_context(agent, None)
        check_context(agent, 131_072)
