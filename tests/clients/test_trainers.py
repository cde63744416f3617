"""What trainers bring along: renderers' client, OpenEnv's check, the shapes of prime-rl and TRL."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lockstep.models import bundled
from lockstep.render import Renderer
from tests.clients.conftest import PYTHON, Clients
from tests.clients.rules import ANSWER
from tests.clients.test_verifiers import rollouts
from tests.processes import TOKEN


async def test_renderers_client(clients: Clients, session: str) -> None:
    """It sends ids of its own making, which the session takes for what they extend."""
    result = clients.run(
        "renderers_client", str(bundled("tiny")), session, base=f"{clients.served.url}/v1"
    )
    assert result["answer"] == ANSWER
    assert result["bridged"] == 2
    sample = await clients.exact_sample(session)
    assert sample.token_ids == result["ids"]


@pytest.mark.failure_mode("F100")
def test_verifiers_and_prime_rl_renormalise_over_the_sets(dense: Clients) -> None:
    """prime-rl's trainer subtracts the logsumexp of the set's logits from the token's logit."""
    place = str(bundled("tiny"))
    turn = dense.run("renderers_truncated", place, base=f"{dense.served.url}/v1")
    assert len(turn["counts"]) == len(turn["ids"])
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    with torch.no_grad():
        ids = turn["prompt"] + turn["ids"]
        logits = model(torch.tensor([ids])).logits[0].double() / 1.2
    whole, replayed = [], []
    sets = torch.tensor(turn["mask_ids"]).split(turn["counts"])
    for at, (token, own) in enumerate(zip(turn["ids"], sets, strict=True), len(turn["prompt"]) - 1):
        assert token in own
        replayed.append(float(logits[at, token] - logits[at, own].logsumexp(0)))
        whole.append(float(logits[at, token] - logits[at].logsumexp(0)))
    assert replayed == pytest.approx(turn["logprobs"], abs=1e-5)
    assert max(ours - theirs for ours, theirs in zip(turn["logprobs"], whole, strict=True)) > 0.01


def test_openenv_grades_the_endpoint_as_trainable(dense: Clients) -> None:
    """On a real model, which is too small to call the tool that the check has in mind."""
    base = f"{dense.served.url}/v1"
    report = dense.run("openenv_validate", "tiny", "check_tools", base=base)
    assert report["capture_level"] == "tokens"
    assert report["logprobs_mode"] == "processed"
    assert (report["ok"], report["findings"], report["param_fixes"]) == (True, [], [])


def test_openenv_sees_that_tools_are_called(clients: Clients) -> None:
    """On the scripted model, whose logprobs know no temperature."""
    base = f"{clients.served.url}/v1"
    report = clients.run("openenv_validate", "tiny", "check_logprobs_mode", base=base)
    assert (report["ok"], report["capture_level"], report["tool_support"]) == (True, "tokens", "ok")


async def test_trl_client(clients: Clients, session: str, tmp_path: Path) -> None:
    """The whole of TRL's client but its weight transfer."""
    renderer = Renderer.load("tiny")
    bridges = [
        renderer.encode(
            f"\n<|im_start|>user\n<tool_response>\n{result}\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        for result in ("503", "1509")
    ]
    (tmp_path / "bridges.json").write_text(json.dumps(bridges))
    packages = next(PYTHON.parents[1].glob("lib/python3*/site-packages"))
    result = clients.run(
        "trl_client", str(packages), str(tmp_path / "bridges.json"), session,
        base=clients.served.url, interpreter=Path(sys.executable),
    )  # fmt: skip
    assert (result["mode"], result["world"]) == ("processed_logprobs", 1)
    assert "Evaluates an arithmetic" in renderer.decode(result["prompt"])
    assert renderer.decode(result["ids"]).endswith(f"{ANSWER}<|im_end|>")
    assert len(result["many"]) == 4
    sample = await clients.exact_sample(session)
    assert sample.token_ids == result["ids"]
    assert result["sampled"] == result["scored"]
    assert result["top"] == 100


async def test_prime_rl_shapes(dense: Clients) -> None:
    """Rollouts by verifiers with a salt for each version, updates by the weight directory alone.

    A second run begins with the same directory name and other weights.
    """
    control, headers = f"{dense.served.admin_url}/v1/rl", {"authorization": f"Bearer {TOKEN}"}
    labels = []
    for run in ("first", "second"):
        step = dense.home / run / "broadcasts" / "step_1"
        step.mkdir(parents=True)
        weights = Path(bundled("tiny") or "") / "model.safetensors"
        if run == "second":  # the others need the model as it was
            shutil.copy(weights, step)
        else:
            save_file({k: v * 1.01 for k, v in load_file(weights).items()}, step / weights.name)
        (step / "STABLE").touch()
        async with httpx.AsyncClient(base_url=control, headers=headers, timeout=60) as admin:
            assert (await admin.post("/pause?mode=keep&clear_cache=false")).status_code == 200
            update = await admin.post("/update_weights", json={"weight_dir": str(step)})
            assert update.status_code == 200, update.text
            assert (await admin.post("/resume")).status_code == 200
        (trace,) = rollouts(dense, "train", "tiny", 1, "--sampling.cache_salt", run)
        sample = await dense.exact_sample(trace["id"], turns=1)
        labels.append({span.version for span in sample.versions})
    assert labels[0] == {"step_1"}
    (second,) = labels[1]
    assert second.startswith("step_1@")
