"""Ten steps of training through a real vLLM server: trainer and engine stay together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.models import bundled
from lockstep.train import StepMetrics, TrainConfig, Trainer
from tests.engines.vllm_servers import OPTIONS, PYTHON, Slot
from tests.processes import TOKEN, ServeProcess

STEPS = 10


@pytest.fixture
def served(vllm_slot: Slot) -> Iterator[ServeProcess]:
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} is not there: run scripts/install-vllm.sh")
    vllm_slot.stop()
    process = ServeProcess(
        "--engine", "vllm", "--sessions", "memory", "--", *OPTIONS,
        model=str(bundled("tiny")), LOCKSTEP_VLLM_PYTHON=str(PYTHON),
    )  # fmt: skip
    yield process
    process.stop()


@pytest.mark.timeout(600)
async def test_ten_steps_of_reverse_keep_mismatch_kl_below_one_in_a_million(
    served: ServeProcess, tmp_path: Path
) -> None:
    config = TrainConfig.of(
        {
            "seed": 1,
            "model": str(bundled("tiny")),
            "run_dir": str(tmp_path / "run"),
            "env": {"name": "reverse"},
            "rollout": {"groups": 4, "group_size": 4, "max_tokens": 16},
            "learner": {"exact": False, "probe_tolerance": 1e-3},
            "loop": {"steps": STEPS},
            "eval": {"prompts": 8},
        }
    )
    steps: list[StepMetrics] = []
    trainer = Trainer(config, served.url, served.admin_url, TOKEN)
    await trainer.run(on_step=steps.append)
    seen = [step.to_json() for step in steps]
    assert len(seen) == STEPS
    worst = max(abs(step["mismatch_kl"]) for step in seen)
    assert worst < 1e-6, [step["mismatch_kl"] for step in seen]
    assert all(step["is_masked"] == 0 for step in seen)
    assert {step["breaks"] for step in seen} == {0}
    assert len({step["version"] for step in seen}) == STEPS
