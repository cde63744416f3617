"""The pinned versions can be installed together, whichever build of torch pip takes."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent

# What torch's build with CUDA, the one that pip takes on Linux by default, requires of Triton. The
# build for CPUs requires nothing, so that an environment with it cannot tell.
TRITON_OF_TORCH = {"2.13.0": "3.7.1"}


def test_triton_is_the_one_that_torch_with_cuda_requires() -> None:
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if re.match(r"[\w.-]+==[\w.]+$", line)
    )
    assert pins["triton"] == TRITON_OF_TORCH[pins["torch"]]
