"""Five faults that were written without knowing how causes are found; see docs/explain.md.

python -m tests.explain.held_out
"""

from __future__ import annotations

import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from lockstep.explain.case import Case
from tests.engine import checkpoints
from tests.explain.collection import run_fault
from tests.explain.faults import Fault
from tests.explain.scene import Scene, mixed, relabel


def two_tensors_of_different_layers_are_stale(scene: Scene) -> Case:
    names = ["model.layers.0.self_attn.k_proj", "model.layers.1.mlp.up_proj"]
    scene.served = mixed(scene.new, scene.old, scene.scratch / "s", names)
    return scene.case(scene.rollout())


def one_worker_prefers_a_token(scene: Scene) -> Case:
    plain = relabel(scene.rollout(count=3), workers=("w0",))
    scene.sampling = {"logit_bias": {17: 1.5}}
    biased = relabel(scene.rollout(count=3, seed=9), workers=("w1",), shaping=())
    return scene.case([*plain, *biased])


def one_worker_samples_hotter(scene: Scene) -> Case:
    plain = relabel(scene.rollout(count=3), workers=("w0",))
    scene.sampling = {"temperature": 1.3}
    hot = relabel(scene.rollout(count=3, seed=9), workers=("w1",), temperature=1.0)
    return scene.case([*plain, *hot])


def adapter_of_another_tenant_is_applied(scene: Scene) -> Case:
    scene.adapter = checkpoints.adapter(scene.new, scene.scratch / "lora", seed=4)
    samples = relabel(scene.rollout(), adapter=None)
    return scene.case(samples, adapter=None, other_adapters=(scene.adapter,))


def logprobs_have_random_errors(scene: Scene) -> Case:
    source = random.Random(0)
    noisy = [
        replace(
            sample,
            logprobs=[
                min(value + source.gauss(0, 0.05), 0.0) if sampled else value
                for value, sampled in zip(sample.logprobs, sample.sampled_mask, strict=True)
            ],
        )
        for sample in scene.rollout()
    ]
    return scene.case(noisy)


HELD_OUT = (
    Fault("two_tensors_of_different_layers_are_stale", ("old_tensors",),
          two_tensors_of_different_layers_are_stale),
    Fault("one_worker_prefers_a_token", ("logit_bias",), one_worker_prefers_a_token),
    Fault("one_worker_samples_hotter", ("temperature",), one_worker_samples_hotter, where="w1"),
    Fault("adapter_of_another_tenant_is_applied", ("adapter_unexpected",),
          adapter_of_another_tenant_is_applied),
    Fault("logprobs_have_random_errors", ("",), logprobs_have_random_errors),
)  # fmt: skip
"""An empty cause: nothing may be named."""


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        for fault in HELD_OUT:
            verdict = run_fault(fault, Path(scratch) / fault.name)
            right = (verdict.cause or "") in fault.causes
            place = verdict.causes[0].location if verdict.causes else ""
            mark = "named" if right and fault.where in place else "MISSED or WRONG"
            sys.stdout.write(f"{mark}: {fault.name}\n  " + "\n  ".join(verdict.lines()) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
