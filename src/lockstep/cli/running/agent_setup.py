"""How each known agent is pointed at a session of the gateway: arguments, variables, one file.

Nothing of the user's own configuration is read or changed.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.tokens.errors import BadRequest

LAUNCHERS = frozenset({"npx", "bunx", "uvx", "uv", "pipx", "env", "time", "timeout", "nice"})
"""Programs whose arguments contain the command of the agent."""
REMOVED = (
    "LOCKSTEP_ADMIN_TOKEN", "LOCKSTEP_ADMIN_TOKEN_FILE", "ANTHROPIC_AUTH_TOKEN",
    "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX",
)  # fmt: skip
"""Variables that an agent does not inherit: an agent needs no admin token, and the others would
send its requests elsewhere."""
FILES = "{files}"
"""Stands for the directory that `AgentSetup.files` are written to."""
TYPED_FILES = "lockstep-record"
"""That directory in `AgentSetup.shell_text`."""

OPENING_TOKENS = {"Codex": 8300, "opencode": 7200, "Qwen Code": 17_300, "cline": 5400}
"""Length of the first prompt for a short task, in tokens of Qwen3's tokenizer. The bundled
tokenizer has 512 tokens and needs 2.5 times as many."""


@dataclass(frozen=True, slots=True)
class SessionAddress:
    """The session that an agent's requests join, and the model it asks for.

    `url` has no /v1. `context` is the context length of the model in tokens, if the server says it.
    """

    url: str
    key: str
    model: str
    context: int | None = None

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"


@dataclass(frozen=True, slots=True)
class AgentSetup:
    """A command as it is run: with the arguments, variables and files that reach the session.

    `agent` is the name of a known agent, or None for another program, which gets the variables that
    the SDKs of OpenAI and Anthropic read.
    """

    agent: str | None
    command: tuple[str, ...]
    variables: Mapping[str, str]
    files: Mapping[str, str] = field(default_factory=dict)

    def command_in(self, directory: Path | str) -> list[str]:
        """Return the command, given the directory of its files."""
        return [part.replace(FILES, str(directory)) for part in self.command]

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the command."""
        passed = {name: value for name, value in inherited.items() if name not in REMOVED}
        return {**passed, **self.variables}

    def shell_text(self) -> str:
        """Return the command as one may type it into a shell."""
        lines = []
        for name, text in self.files.items():
            path = Path(TYPED_FILES, name)
            lines.append(f"mkdir -p {path.parent}")
            lines.append(f"printf %s {shlex.quote(text)} > {path}")
        words = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        words.append(shlex.join(self.command_in(TYPED_FILES)))
        removed = " ".join(f"-u {name}" for name in REMOVED if name in os.environ)
        lines.append(" \\\n  ".join([f"env {removed}".strip(), *words]))
        return "\n".join(lines)


def set_up(command: Sequence[str], session: SessionAddress) -> AgentSetup:
    """Return how to run a command so that its requests join the session."""
    at, agent = _find_agent(command)
    extra = AGENTS[agent](session, command) if agent is not None else Additions()
    whole = (*command[: at + 1], *extra.arguments, *command[at + 1 :])
    return AgentSetup(agent, whole, {**_sdk_variables(session), **extra.variables}, extra.files)


def check_context(agent: str | None, context: int | None) -> None:
    """Raise BadRequest if not even the first prompt of an agent fits into the context."""
    opening = OPENING_TOKENS.get(agent or "")
    if opening is not None and context is not None and context < opening:
        raise BadRequest(
            f"{agent} opens with about {opening:,} tokens, or {2.5 * opening:,.0f} in the "
            f"tokenizer of the bundled models, but the model's context is {context:,}: serve a "
            "model with a longer one, or a scripted worker (see docs/agents.md)",
            param="model",
        )


@dataclass(frozen=True, slots=True)
class Additions:
    """Settings of an agent besides the variables of the SDKs. Arguments follow its program."""

    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


def _sdk_variables(session: SessionAddress) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": session.base_url,
        "OPENAI_API_BASE": session.base_url,  # the older name, which LiteLLM and aider read
        "OPENAI_API_KEY": session.key,
        "OPENAI_MODEL": session.model,
        "ANTHROPIC_BASE_URL": session.url,
        "ANTHROPIC_API_KEY": session.key,
        "ANTHROPIC_MODEL": session.model,
    }


def _codex(session: SessionAddress, command: Sequence[str]) -> Additions:
    provider = {
        "name": "lockstep", "base_url": session.base_url, "wire_api": "responses",
        "env_key": "OPENAI_API_KEY", "supports_websockets": False,
    }  # fmt: skip
    table = ", ".join(f"{name} = {json.dumps(value)}" for name, value in provider.items())
    values = [
        f"model = {json.dumps(session.model)}",
        'model_provider = "lockstep"',
        f"model_providers.lockstep = {{ {table} }}",
    ]
    if session.context is not None:
        values.append(f"model_context_window = {session.context}")
    return Additions(tuple(part for value in values for part in ("-c", value)))


def _claude_code(session: SessionAddress, command: Sequence[str]) -> Additions:
    variables = {"ANTHROPIC_SMALL_FAST_MODEL": session.model}
    if session.context is not None:
        variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(session.context)
    return Additions(variables=variables)


def _opencode(session: SessionAddress, command: Sequence[str]) -> Additions:
    model: dict[str, object] = {"reasoning": True, "tool_call": True}
    if session.context is not None:
        output = min(8192, session.context // 4)
        model["limit"] = {"context": session.context, "output": output}
    name = f"lockstep/{session.model}"
    config = {
        "autoupdate": False,
        "model": name,
        "small_model": name,
        "provider": {
            "lockstep": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": session.base_url, "apiKey": session.key},
                "models": {session.model: model},
            }
        },
    }
    return Additions(
        variables={
            "OPENCODE_CONFIG_CONTENT": json.dumps(config),
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
        }
    )


def _qwen_code(session: SessionAddress, command: Sequence[str]) -> Additions:
    return Additions(() if "--auth-type" in command else ("--auth-type", "openai"))


def _mini_swe_agent(session: SessionAddress, command: Sequence[str]) -> Additions:
    variables = {
        "MSWEA_CONFIGURED": "true",
        "MSWEA_MODEL_NAME": f"openai/{session.model}",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    return Additions(variables=variables)


def _aider(session: SessionAddress, command: Sequence[str]) -> Additions:
    variables = {
        "AIDER_MODEL": f"openai/{session.model}",
        "AIDER_SHOW_MODEL_WARNINGS": "false",
        "AIDER_CHECK_UPDATE": "false",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    return Additions(variables=variables)


def _cline(session: SessionAddress, command: Sequence[str]) -> Additions:
    # It reads its provider from its data directory only; with another one it starts without the
    # user's history.
    provider = "openai-compatible"
    settings = {
        "provider": provider, "apiKey": session.key, "model": session.model,
        "baseUrl": session.base_url,
    }  # fmt: skip
    entry = {
        "settings": settings, "updatedAt": "1970-01-01T00:00:00.000Z", "tokenSource": "manual",
    }  # fmt: skip
    stored = {
        "version": 1, "lastUsedProvider": provider, "modes": {}, "providers": {provider: entry},
    }  # fmt: skip
    return Additions(
        ("--data-dir", FILES), files={"settings/providers.json": json.dumps(stored)}
    )  # fmt: skip


AGENTS: dict[str, Callable[[SessionAddress, Sequence[str]], Additions]] = {
    "Codex": _codex,
    "Claude Code": _claude_code,
    "opencode": _opencode,
    "Qwen Code": _qwen_code,
    "mini-swe-agent": _mini_swe_agent,
    "aider": _aider,
    "cline": _cline,
}
PROGRAMS = {
    "codex": "Codex", "claude": "Claude Code", "claude-code": "Claude Code",
    "opencode": "opencode", "opencode-ai": "opencode", "qwen": "Qwen Code",
    "qwen-code": "Qwen Code", "mini": "mini-swe-agent", "mini-swe-agent": "mini-swe-agent",
    "aider": "aider", "cline": "cline",
}  # fmt: skip
"""Names of the programs, and of the packages that npx and uvx run."""


def _find_agent(command: Sequence[str]) -> tuple[int, str | None]:
    """Return where the program of a known agent is in the command, and which agent it is."""
    for at, part in enumerate(command):
        # A package may name its version: @openai/codex@0.166.0
        name = part.rpartition("/")[2].partition("@")[0]
        if name in PROGRAMS:
            return at, PROGRAMS[name]
        if at == 0 and name not in LAUNCHERS:
            break
    return 0, None
