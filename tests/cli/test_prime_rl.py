"""`lockstep serve --prime-rl` prints what prime-rl needs, and what it prints works."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from lockstep.cli.serving.prime_rl import prime_rl_key, prime_rl_toml
from lockstep.models import bundled
from lockstep.running_gateways import RunningGateway

KEY = "one-key-for-both"


@pytest.fixture
def printed(tmp_path: Path) -> Iterator[str]:
    """What a gateway prints up to the key, while it serves."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep", "serve", "tiny", "--prime-rl", "--port", "0",
         "--admin-port", "0", "--state-dir", "memory", "--checkpoint-root", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**clean, "LOCKSTEP_ADMIN_TOKEN": KEY, "LOCKSTEP_API_KEYS": KEY},
    )  # fmt: skip
    lines: list[str] = []
    for line in process.stdout or ():
        lines.append(line)
        if line.startswith("export"):
            break
    yield "".join(lines)
    process.terminate()
    process.wait(60)


def test_what_is_printed_drives_data_and_control_plane_with_one_key(
    printed: str, tmp_path: Path
) -> None:
    start, end = printed.index("# prime-rl: rl.toml"), printed.index("# prime-rl has one key")
    config = tomllib.loads(printed[start:end])
    assert config["weight_broadcast"] == {"type": "filesystem"}
    client = config["orchestrator"]["model"]["client"]
    assert client["api_key_var"] == "VLLM_API_KEY"
    assert 'export VLLM_API_KEY="$LOCKSTEP_ADMIN_TOKEN"' in printed
    step = tmp_path / "broadcasts" / "step_1"
    step.mkdir(parents=True)
    (step / "model.safetensors").write_bytes(
        (Path(bundled("tiny") or "") / "model.safetensors").read_bytes()
    )
    (step / "STABLE").touch()
    headers = {"authorization": f"Bearer {KEY}"}
    (admin,) = client["admin_base_url"]
    with httpx.Client(headers=headers, timeout=60) as http:
        (card,) = http.get(f"{client['base_url']}/models").json()["data"]
        assert card["id"] == config["model"]["name"]
        assert http.get(f"{admin}/health").status_code == 200
        assert http.post(f"{admin}/pause?mode=keep&clear_cache=false").status_code == 200
        body = {"weight_dir": str(step), "version_uid": None}
        update = http.post(f"{admin}/update_weights", json=body)
        assert update.status_code == 200, update.text
        assert http.post(f"{admin}/resume").status_code == 200
        url = client["base_url"].removesuffix("/v1") + "/inference/v1/generate"
        turn = http.post(url, json={"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}})
        assert turn.json()["choices"][0]["weight_versions"][0]["version"] == "step_1"


def test_a_token_file_and_the_allowed_directories_are_named() -> None:
    gateway = RunningGateway("http://h:1", "http://h:2", "m", 1, "/run/a token", None)
    assert prime_rl_key(gateway, keys=False) == "export VLLM_API_KEY=\"$(cat '/run/a token')\""
    assert "be in /data" in prime_rl_toml(gateway, ("/data",))
    assert "--checkpoint-root" in prime_rl_toml(gateway, ())
