"""TRL's own trainers on a gateway: their figures, with live samples and proved updates."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint.open import open_checkpoint
from lockstep.checkpoint.sliced_reader import SlicedReader
from lockstep.fleet.remote import RemoteFleet
from lockstep.replay import audit
from lockstep.tokens.errors import BadRequest
from tests.processes import TOKEN, ServeProcess

pytestmark = pytest.mark.timeout(400)
ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("LOCKSTEP_TEST_TRL") or ROOT / ".venv-trl" / "bin" / "python")
PROGRAMS = Path(__file__).parent / "programs"
DIFFERENCE = "sampling/sampling_logp_difference/max"


def launch(
    program: str, output: Path, *arguments: str, processes: int = 1
) -> subprocess.CompletedProcess[str]:
    """A program of this folder with TRL, after its end."""
    if not PYTHON.exists():
        pytest.fail(f"{PYTHON} is missing: make test-trainers installs it")
    python = [str(PYTHON)]
    if processes > 1:
        python += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [*python, str(PROGRAMS / f"{program}.py"), *arguments]
    environ = {"PATH": os.environ["PATH"], "HOME": str(output), "OMP_NUM_THREADS": "2",
               "OMP_WAIT_POLICY": "PASSIVE",
               "HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1",
               "PYTHONPATH": os.environ.get("PYTHONPATH", "")}  # fmt: skip
    output.mkdir(exist_ok=True)
    return subprocess.run(
        command, cwd=output, env=environ, capture_output=True, text=True, timeout=380
    )


def run(
    program: str, served: ServeProcess, output: Path, *arguments: str, processes: int = 1
) -> dict[str, Any]:
    """What the program prints last, after it has trained against the gateway."""
    where = served.url, served.admin_url, TOKEN, str(output)
    result = launch(program, output, *where, *arguments, processes=processes)
    assert result.returncode == 0, f"{program}: {result.stdout[-2000:]}{result.stderr[-6000:]}"
    record: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    return record


def steps(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry for entry in record["log"] if "loss" in entry]


async def state(served: ServeProcess) -> dict[str, Any]:
    async with RemoteFleet(served.admin_url, token=TOKEN) as fleet:
        return await fleet.state()


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[ServeProcess]:
    process = ServeProcess("--sessions", "memory", *getattr(request, "param", ()))
    yield process
    process.stop()


def test_three_steps_of_grpo_agree_closely_with_an_unchanged_model(
    served: ServeProcess, tmp_path: Path
) -> None:
    record = run("trl_grpo", served, tmp_path / "out", "--close")
    assert [0.0 < entry[DIFFERENCE] < 1e-5 for entry in steps(record)] == [True] * 3
    assert asyncio.run(state(served))["version"] == "step-2"
    # Those that are served and may be gone back to; the first is not kept.
    directory = tmp_path / "out/lockstep/run-0"
    assert sorted(path.name for path in directory.glob("step-*")) == ["step-1", "step-2"]
    # The chain has the links that are known here, and an audit names the others.
    outcome = asyncio.run(audit(directory, chain_only=True))
    assert outcome.held
    assert outcome.steps == 2
    assert not {"config", "code", "updates", "seeds", "samples.token_ids"} & outcome.missing.keys()
    assert outcome.missing["learning.gradients"] == outcome.missing["rewards"] == 2
    with pytest.raises(BadRequest, match=r"written by trl, lack .*--chain-only"):
        asyncio.run(audit(directory))


def test_three_steps_of_grpo_agree_bit_for_bit_with_an_exact_model(
    served: ServeProcess, tmp_path: Path
) -> None:
    record = run("trl_grpo", served, tmp_path / "out", "--exact", "--temperature", "0.8")
    assert [entry[DIFFERENCE] for entry in steps(record)] == [0.0] * 3
    assert {entry["sampling/importance_sampling_ratio/max"] for entry in steps(record)} == {1.0}


@pytest.mark.failure_mode("F100")
@pytest.mark.parametrize(("mode", "largest"), [("--exact", 0.0), ("--close", 1e-5)])
def test_truncated_tokens_are_compared_over_the_sets_that_they_were_drawn_from(
    served: ServeProcess, tmp_path: Path, mode: str, largest: float
) -> None:
    """With the trainer's own correction, whose ratio would be 0.9 on average without the sets."""
    record = run("trl_grpo", served, tmp_path / "out", "--top-k", "2", "--steps", "2", mode)
    assert all(entry[DIFFERENCE] <= largest for entry in steps(record))
    ratios = [entry["sampling/importance_sampling_ratio/min"] for entry in steps(record)]
    assert ratios == pytest.approx([1.0, 1.0], abs=1e-5)


def test_conversations_with_a_tool_are_rows_with_a_mask_and_a_version(
    served: ServeProcess, tmp_path: Path
) -> None:
    record = run("trl_grpo", served, tmp_path / "out", "--tools", "--exact")
    assert [entry[DIFFERENCE] for entry in steps(record)] == [0.0] * 3
    assert record["versions"] == [f"step-{at}" for at in range(3) for _ in range(8)]
    called = [mask for mask, turns in zip(record["masks"], record["turns"], strict=True)
              if turns == 2]  # fmt: skip
    assert called, "no rollout called the tool"
    for mask in called:
        first_zero = mask.index(0)
        # Sampled, then what the tool said, then sampled again.
        assert all(mask[:first_zero])
        assert any(mask[first_zero:])
    assert {sum(mask) for mask in record["masks"]} != {len(record["masks"][0])}


def test_an_adapter_is_published_as_an_adapter(served: ServeProcess, tmp_path: Path) -> None:
    record = run("trl_grpo", served, tmp_path / "out", "--lora", "--steps", "2")
    assert [entry[DIFFERENCE] for entry in steps(record)] == [0.0] * 2
    assert list(asyncio.run(state(served))["adapters"]) == ["trl-policy"]


def test_two_ranks_train_on_what_the_first_has_published(
    served: ServeProcess, tmp_path: Path
) -> None:
    record = run("trl_grpo", served, tmp_path / "out", "--steps", "2", processes=2)
    assert [entry[DIFFERENCE] for entry in steps(record)] == [0.0] * 2
    operations = asyncio.run(state(served))["operations"]
    updates = [each["version"] for each in operations if each["kind"] == "update_weights"]
    assert sorted(updates) == ["step-0", "step-1"]


@pytest.mark.exact_arithmetic
@pytest.mark.failure_mode("F79")
def test_two_ranks_share_out_the_model_and_write_its_checkpoints(
    served: ServeProcess, tmp_path: Path
) -> None:
    arguments = "--exact", "--shard", "--steps", "2"
    record = run("trl_grpo", served, tmp_path / "out", *arguments, processes=2)
    assert [entry[DIFFERENCE] for entry in steps(record)] == [0.0] * 2
    assert all(entry["grad_norm"] > 0 for entry in steps(record))
    reader = open_checkpoint(tmp_path / "out/lockstep/run-0/step-1")
    assert isinstance(reader, SlicedReader)
    whole = sum(tensor.nbytes for tensor in reader.tensors.values())
    assert all(0.45 < own.nbytes / whole < 0.55 for own in reader.records)
    assert asyncio.run(state(served))["version"] == "step-1"


@pytest.fixture(scope="module")
def rloo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServeProcess, dict[str, Any]]]:
    """A gateway on which an RLOOTrainer trained four steps, and then two of them again."""
    output = tmp_path_factory.mktemp("rloo")
    process = ServeProcess("--sessions", "memory")
    arguments = "--rloo", "--exact", "--resume", "--steps", "4", "--temperature", "1.3"
    yield process, run("trl_grpo", process, output, *arguments)
    process.stop()


@pytest.mark.exact_arithmetic
def test_rloo_computes_the_logprobs_that_the_sampler_had(
    rloo: tuple[ServeProcess, dict[str, Any]],
) -> None:
    assert [entry[DIFFERENCE] for entry in steps(rloo[1])] == [0.0] * 4
    assert any(entry["reward_std"] > 0.0 for entry in steps(rloo[1]))


@pytest.mark.exact_arithmetic
def test_a_resumed_run_draws_the_samples_of_an_uninterrupted_one(
    rloo: tuple[ServeProcess, dict[str, Any]],
) -> None:
    sampled, resumed = rloo[1]["sampled"], rloo[1]["resumed"]
    assert len(sampled) == 4
    assert resumed == sampled[2:]
    assert resumed[0] != resumed[1]


@pytest.mark.exact_arithmetic
def test_an_adapter_on_updated_base_weights_is_refused_before_training(
    rloo: tuple[ServeProcess, dict[str, Any]], tmp_path: Path
) -> None:
    where = rloo[0].url, rloo[0].admin_url, TOKEN, str(tmp_path)
    result = launch("trl_grpo", tmp_path, *where, "--lora", "--steps", "1")
    assert result.returncode != 0
    assert "the fleet serves version 'step-" in result.stderr
    assert "an adapter trained on one does not fit the other" in result.stderr


def test_other_trainers_are_refused_with_the_supported_ones(tmp_path: Path) -> None:
    result = launch("trl_unsupported", tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    refused: dict[str, str] = json.loads(result.stdout.strip().splitlines()[-1])
    assert list(refused) == ["SFTTrainer", "DPOTrainer", "OnlineDPOTrainer", "GKDTrainer",
                             "AsyncGRPOTrainer"]  # fmt: skip
    for name, error in refused.items():
        assert error.startswith(f"BadRequest: {name} cannot sample from Lockstep")
        assert "GRPOTrainer and RLOOTrainer" in error
        assert "AsyncGRPOTrainer takes LockstepRolloutWorker" in error


@pytest.mark.parametrize("served", [("--workers", "2")], indirect=True)
def test_ten_asynchronous_steps_outlive_a_killed_worker(
    served: ServeProcess, tmp_path: Path
) -> None:
    pid = str(served.workers[0]["pid"])
    record = run("trl_async", served, tmp_path / "out", "--kill", pid)
    assert len(steps(record)) == 10
    assert steps(record)[0]["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert all(entry["sample/staleness_max"] <= 2 for entry in steps(record))
    # A row is of one of the eleven versions that were published, and they go up.
    assert sorted(record["labels"].values()) == list(range(1, 12))
    assert set(record["versions"]) <= set(range(1, 12))
    assert max(record["versions"]) >= 8
    assert asyncio.run(state(served))["version"] == "step-10"
