"""The probe of a model as it is on disk, computed by transformers in a process of its own.

    python -m lockstep.engine.model_probe MODEL FILE

Before a gateway has a trainer, this says what the logprobs of the weights are that its servers were
started with. Gateways import no torch, hence the process.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from lockstep.engine.probe import make_probe


def main(directory: str, target: str) -> int:
    """Write the probe of the model in `directory`, in float32; return the exit code."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    make_probe(model).write(Path(target))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
