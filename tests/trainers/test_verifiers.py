"""Environments of the real verifiers on a gateway: programs of every dialect, a training run."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lockstep.fleet.remote import RemoteFleet
from lockstep.tokens import Sample
from tests.processes import TOKEN, ServeProcess

pytestmark = pytest.mark.timeout(400)
ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("LOCKSTEP_TEST_TRL") or ROOT / ".venv-trl" / "bin" / "python")
PROGRAMS, EXAMPLE = Path(__file__).parent / "programs", ROOT / "examples" / "verifiers"


def run(*command: str, home: Path) -> str:
    if not PYTHON.exists():
        pytest.fail(f"{PYTHON} is missing: make test-trainers installs it")
    inherited = os.environ.get("PYTHONPATH", "")
    environ = {"PATH": os.environ["PATH"], "HOME": str(home), "NO_PROXY": "127.0.0.1",
               "OMP_WAIT_POLICY": "PASSIVE",
               "LOCKSTEP_ADMIN_TOKEN": TOKEN, "PYTHONPATH": f"{EXAMPLE}:{inherited}"}  # fmt: skip
    result = subprocess.run(
        [str(PYTHON), *command], cwd=home, env=environ, capture_output=True, text=True, timeout=380
    )
    assert result.returncode == 0, f"{command}: {result.stdout[-2000:]}{result.stderr[-6000:]}"
    return result.stdout


@pytest.mark.parametrize(
    ("dialect", "more"),
    [("messages", ()), ("messages", ("--stream",)), ("responses", ()), ("chat", ())],
)
async def test_a_program_of_any_dialect_leaves_one_exact_branch(
    served_gateway: ServeProcess, tmp_path: Path, dialect: str, more: tuple[str, ...]
) -> None:
    program = str(PROGRAMS / "verifiers_play.py")
    told: dict[str, Any] = json.loads(
        run(program, served_gateway.url, dialect, "2", *more, home=tmp_path)
        .strip()
        .splitlines()[-1]
    )
    assert told["branches"] == [1, 1, 1]
    assert [[turn["bridged"] for turn in turns] for turns in told["turns"]] == [[False, True]] * 3
    async with RemoteFleet(served_gateway.admin_url, token=TOKEN) as fleet:
        stored = [await fleet.samples(name) for name in told["sessions"]]
    played = [[Sample.from_json(json.dumps(each)) for each in one] for one in told["samples"]]
    by_ids = {tuple(sample.token_ids): sample for (sample,) in stored}
    for (sample,) in played:
        kept = by_ids[tuple(sample.token_ids)]
        assert sample.sampled_mask == kept.sampled_mask
        assert sample.logprobs == kept.logprobs
        assert sample.versions == kept.versions
        assert (sample.logprob_mode, sample.temperature) == (kept.logprob_mode, kept.temperature)


def test_streams_hold_thoughts_and_tool_calls(tmp_path: Path) -> None:
    told = json.loads(run(str(PROGRAMS / "verifiers_streams.py"), home=tmp_path))
    assert told == [["So:", "calc", {"expression": "1 + 2"}, "tool_calls"]] * 2


def test_lockstep_trains_on_an_environment_of_verifiers(
    served_gateway: ServeProcess, tmp_path: Path
) -> None:
    config = (EXAMPLE / "run.toml").read_text()
    for name, url in (("8000", served_gateway.url), ("8001", served_gateway.admin_url)):
        config = config.replace(f"http://127.0.0.1:{name}", url)
    config = config.replace("steps = 5", "steps = 2").replace("groups = 4", "groups = 2")
    (tmp_path / "run.toml").write_text(config)
    printed = run("-m", "lockstep", "train", "run.toml", "--json", home=tmp_path)
    *steps, result = map(json.loads, printed.strip().splitlines())
    assert [step["step"] for step in steps] == [1, 2]
    assert result["numerics"]["mode"] == "exact"
    assert result["mismatch_max"] == 0.0


def test_a_taskset_that_is_not_there_is_named(served_gateway: ServeProcess, tmp_path: Path) -> None:
    code = (
        "from lockstep.train.envs.environment import load_environment\n"
        "from lockstep.tokens.errors import BadRequest\n"
        "try:\n    load_environment('verifiers:no-such-thing')\n"
        "except BadRequest as error:\n    print(error)\n"
    )
    assert "no-such-thing" in run("-c", code, home=tmp_path)
