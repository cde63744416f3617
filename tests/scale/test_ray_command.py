"""How the actors of a fleet start workers, in the environment that has Ray."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, sys
from lockstep.integrations.ray import RayFleet
from lockstep.integrations.ray.node_process import NodeCommand
from lockstep.tokens.errors import LockstepError

def attempt(make):
    try:
        return make()
    except LockstepError as error:
        return f"{type(error).__name__}: {error.message}"

vllm = NodeCommand(model="m", engine="vllm", api_key="key-of-the-workers")
own = NodeCommand(model="m", arguments=("--device", "cuda"))
print(json.dumps({
    "open": attempt(lambda: vllm.line("ray-0", "10.0.0.7")),
    "loopback": attempt(lambda: vllm.line("ray-0", "127.0.0.1")),
    "own": own.line("ray-0", "10.0.0.7"),
    "environment": vllm.environment({"LOCKSTEP_API_KEYS": "of-the-driver", "A": "b"}, "token"),
    "none": attempt(lambda: RayFleet("m", 0, gateway="http://g", token="t") and None),
    "nowhere": attempt(lambda: RayFleet("m", 1, gateway=[], token="t") and None),
}))
"""


def answers() -> dict[str, Any]:
    python = ROOT / ".venv-scale/bin/python"
    done = subprocess.run(
        [python, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60
    )
    return dict(json.loads(done.stdout))


def test_a_worker_is_started_with_what_it_needs_and_nothing_that_is_not_its() -> None:
    results = answers()
    assert results["open"].startswith("BadRequest: vLLM would listen on 10.0.0.7")
    assert "--logprobs-mode" in results["loopback"]
    assert "--insecure" not in results["own"], "its own worker refuses to be open by itself"
    assert results["own"][-2:] == ["--device", "cuda"]
    assert results["environment"] == {
        "A": "b",
        "LOCKSTEP_ADMIN_TOKEN": "token",
        "LOCKSTEP_API_KEYS": "key-of-the-workers",
        "VLLM_API_KEY": "key-of-the-workers",
    }
    assert results["none"].startswith("BadRequest: workers is 0")
    assert results["nowhere"].startswith("BadRequest: gateway is empty")
