"""Real agents as processes: each with a clean environment, a HOME of its own and dummy keys."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INSTALLED = Path(__file__).parents[2] / ".venv-agents"
NODE = INSTALLED / "node_modules"
PATH = f"{NODE / 'node' / 'bin'}:{INSTALLED / 'bin'}:{NODE / '.bin'}:/usr/local/bin:/usr/bin:/bin"
SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended, and what it wrote."""

    status: int
    output: str
    errors: str

    def check(self) -> Ended:
        assert self.status == 0, f"{self.status}\n{self.output[-3000:]}\n{self.errors[-3000:]}"
        return self


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A home and a work directory with one file, in git, as harnesses expect it."""

    home: Path
    work: Path

    @classmethod
    async def make(cls, directory: Path) -> Sandbox:
        sandbox = cls(directory / "home", directory / "work")
        sandbox.home.mkdir()
        sandbox.work.mkdir()
        (sandbox.work / "calc.py").write_text("def add(a, b):\n    return a - b\n")
        await sandbox.run(["git", "init", "--quiet"])
        return sandbox

    async def run(self, command: list[str], **environment: str) -> Ended:
        """Runs a command to its end, which is killed after two minutes."""
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=self.work,
            env={"PATH": PATH, "HOME": str(self.home), "LANG": "C.UTF-8", **environment},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(SECONDS):
                output, errors = await process.communicate()
        except TimeoutError:
            os.killpg(process.pid, 9)
            output, errors = await process.communicate()
            raise AssertionError(f"{command[0]} did not end\n{output[-3000:]!r}") from None
        return Ended(process.returncode or 0, output.decode(), errors.decode())

    async def codex(self, url: str, *arguments: str, compact_at: int | None = None) -> Ended:
        config = self.home / ".codex" / "config.toml"
        config.parent.mkdir(exist_ok=True)
        config.write_text(
            ("" if compact_at is None else f"model_auto_compact_token_limit = {compact_at}\n")
            + f'model = "tiny"\nmodel_provider = "local"\n[model_providers.local]\nname = "local"\n'
            f'base_url = "{url}/v1"\nwire_api = "responses"\nenv_key = "LOCAL_KEY"\n'
            "supports_websockets = false\n"
        )
        options = ["--skip-git-repo-check", "-s", "danger-full-access", "--json"]
        return await self.run(
            [str(NODE / ".bin" / "codex"), "exec", *options, *arguments], LOCAL_KEY="dummy"
        )

    async def opencode(self, url: str, package: str, task: str) -> Ended:
        model = {
            "reasoning": True,
            "tool_call": True,
            "limit": {"context": 131072, "output": 8192},
        }
        provider = {
            "npm": package,
            "options": {"baseURL": f"{url}/v1", "apiKey": "dummy"},
            "models": {"tiny": model},
        }
        config: dict[str, Any] = {
            "autoupdate": False,
            "provider": {"local": provider},
            "small_model": "local/tiny",
        }
        path = self.home / ".config" / "opencode" / "opencode.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(config))
        command = [str(NODE / ".bin" / "opencode"), "run", "--auto", "-m", "local/tiny"]
        return await self.run(
            [*command, "--format", "json", task],
            OPENCODE_DISABLE_MODELS_FETCH="1",
            OPENCODE_DISABLE_AUTOUPDATE="1",
        )

    async def qwen(self, url: str, kind: str, task: str, window: int | None = None) -> Ended:
        if window is not None:
            settings = self.home / ".qwen" / "settings.json"
            settings.parent.mkdir()
            model = {"generationConfig": {"contextWindowSize": window}}
            settings.write_text(json.dumps({"model": model}))
        command = [str(NODE / ".bin" / "qwen"), "--yolo", "--auth-type", kind, "-m", "tiny"]
        return await self.run(
            [*command, "-o", "stream-json", task],
            OPENAI_API_KEY="dummy",
            OPENAI_BASE_URL=f"{url}/v1",
            OPENAI_MODEL="tiny",
            ANTHROPIC_API_KEY="dummy",
            ANTHROPIC_BASE_URL=url,
        )

    async def mini(self, url: str, model: str, *arguments: str) -> Ended:
        command = [str(INSTALLED / "bin" / "mini"), "-y", "--exit-immediately", "-m", model]
        base = url if model.startswith("anthropic/") else f"{url}/v1"
        return await self.run(
            [
                *command,
                *("-t", "Add the numbers.", "-c", "mini.yaml"),
                *("-c", f"model.model_kwargs.api_base={base}", "-o", "traj.json", *arguments),
            ],
            OPENAI_API_KEY="dummy",
            ANTHROPIC_API_KEY="dummy",
            MSWEA_CONFIGURED="true",
            MSWEA_COST_TRACKING="ignore_errors",
            LITELLM_LOCAL_MODEL_COST_MAP="True",
        )
