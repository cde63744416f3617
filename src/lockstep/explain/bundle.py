"""A zip file with what is needed to reproduce a verdict, and no secrets."""

from __future__ import annotations

import json
import platform
import zipfile
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.checkpoint.digest import combined
from lockstep.engine.config import ModelConfig
from lockstep.engine.exact import own_plan
from lockstep.engine.weights.weights import Layout, Weights
from lockstep.explain.case import Case
from lockstep.explain.explanation import Explanation

PACKAGES = ("lockstep-rl", "torch", "transformers", "numpy", "safetensors")
README = """# Bundle of `lockstep explain`

- verdict.json: the verdict, with every substitution that was tried
- samples.jsonl: the compared samples, without the notes of clients
- trainer.npy: the trainer's logprobs of the sampled tokens, if there were any
- checkpoints.json: configuration of the model, and digests of each checkpoint (no weights)
- environment.json: versions of packages, and the arithmetic of the machine

To repeat it, with the checkpoints whose digests these are:

    lockstep explain samples.jsonl --checkpoint DIR{trainer}

It contains token ids, which are the text of prompts and completions. It contains no addresses,
keys, paths or environment variables.
"""


def write_bundle(path: Path, case: Case, verdict: Explanation) -> None:
    """Write the bundle. Notes of clients, names of workers' hosts and directories are left out."""
    samples = b"\n".join(_plain(case, at) for at in range(len(case.samples))) + b"\n"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        trainer = "" if case.trainer is None else " --trainer trainer.npy"
        archive.writestr("README.md", README.format(trainer=trainer))
        archive.writestr("verdict.json", _json(verdict.to_json()))
        archive.writestr("samples.jsonl", samples)
        archive.writestr("checkpoints.json", _json(_checkpoints(case)))
        archive.writestr("environment.json", _json(_environment(case)))
        if case.trainer is not None:
            with archive.open("trainer.npy", "w") as file:
                np.save(file, np.asarray(case.trainer, dtype=np.float64), allow_pickle=False)


def _plain(case: Case, at: int) -> bytes:
    """Return a sample without what clients wrote, and with workers by number."""
    sample = case.samples[at]
    names = sorted({worker for item in case.samples for worker in item.workers})
    workers = tuple(f"worker-{names.index(worker)}" for worker in sample.workers)
    return replace(sample, notes=(), workers=workers, harness=None, evidence="").to_json()


def _checkpoints(case: Case) -> dict[str, Any]:
    config = json.loads((case.checkpoint / "config.json").read_bytes())
    config.pop("_name_or_path", None)
    directories = {"checkpoint": case.checkpoint}
    directories |= {label or f"other-{at}": path for at, (label, path) in enumerate(case.others)}
    return {"config": config, "digests": {n: _digest(path) for n, path in directories.items()}}


def _digest(directory: Path) -> str | None:
    import torch

    layout = Layout(ModelConfig.read(directory))
    weights = Weights.load(directory, layout, "bundle", device="cpu", dtype=torch.float32)
    return None if weights.digests is None else combined(weights.digests)


def _environment(case: Case) -> dict[str, Any]:
    return {
        "packages": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "numerics": own_plan(case.checkpoint).to_json(),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False, default=str)
