"""`lockstep tinker` refuses what clients could not use, before it starts anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.cli.serving.trainer_view import print_trainer
from lockstep.gateway.options import GatewayOptions


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("LOCKSTEP_")}
    return subprocess.run(
        [sys.executable, "-m", "lockstep", "tinker", *arguments],
        env=clean | environ, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "environ", "says"),
    [
        (("nowhere",), {}, "expected a bundled name or a directory"),
        (("tiny", "--host", "0.0.0.0"), {}, "would serve every client"),
        (("tiny",), {"LOCKSTEP_API_KEYS": "sk-123456789"}, "no key that begins with tml-"),
        (("tiny",), {"LOCKSTEP_API_KEYS": "sk-123456789"}, "keys add TENANT --prefix tml-"),
        (("tiny", "--store", "postgresql://db/x"), {}, "gateways without a trainer"),
        (("tiny", "--worker", "http://127.0.0.1:1"), {}, "add --engine vllm"),
    ],
)
def test_what_cannot_work_is_refused_at_once(
    arguments: tuple[str, ...], environ: dict[str, str], says: str, tmp_path: Path
) -> None:
    ports = ("--port", "0", "--admin-port", "0")
    result = run(*arguments, *ports, "--state-dir", str(tmp_path / "state"), **environ)
    assert result.returncode == 2
    assert says in result.stderr
    assert not (tmp_path / "state").exists()


def test_keys_of_a_file_may_begin_as_clients_demand() -> None:
    keys = {"LOCKSTEP_API_KEYS": "sk-123456789", "LOCKSTEP_KEY_FILE": "keys.json"}
    result = run("nowhere", **keys)  # the next thing that is looked at
    assert "expected a bundled name or a directory" in result.stderr


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (GatewayOptions(), "tml-local"),
        (GatewayOptions(api_keys=("tml-1",)), "a key of LOCKSTEP_API_KEYS that begins with tml-"),
        (
            GatewayOptions(key_file=Path("keys.json")),
            "a key that `lockstep keys add TENANT --prefix tml- --key-file keys.json` made",
        ),
    ],
)
def test_the_key_that_a_recipe_needs_is_told(
    options: GatewayOptions, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tenants = SimpleNamespace(base=SimpleNamespace(directory=Path("/models/tiny")))
    trainer: Any = SimpleNamespace(note="", state_dir=Path("/state"), tenants=tenants)
    print_trainer(trainer, "http://127.0.0.1:8000", options)
    exported = f"export TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY={key}\n"
    assert exported in capsys.readouterr().out
