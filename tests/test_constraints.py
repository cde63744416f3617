"""The pinned versions can be installed together, whichever build of torch pip takes."""

import re
import subprocess
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent

# What torch's build with CUDA, the one that pip takes on Linux by default, requires of Triton. The
# build for CPUs requires nothing, so that an environment with it cannot tell.
TRITON_OF_TORCH = {"2.13.0": "3.7.1"}
PINS = dict(
    line.split("==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if re.match(r"[\w.-]+==[\w.]+$", line)
)


def torch_range() -> Requirement:
    """The versions of torch that the extra `engine` allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = map(Requirement, project["optional-dependencies"]["engine"])
    return next(requirement for requirement in names if requirement.name == "torch")


def test_triton_is_the_one_that_torch_with_cuda_requires() -> None:
    assert PINS["triton"] == TRITON_OF_TORCH[PINS["torch"]]


def test_the_pinned_torch_is_the_newest_minor_version_that_the_extra_allows() -> None:
    major, minor, _ = PINS["torch"].split(".")
    assert torch_range().specifier.contains(PINS["torch"])
    assert not torch_range().specifier.contains(f"{major}.{int(minor) + 1}.0")


def test_the_lowest_torch_that_the_extra_allows_has_a_make_target() -> None:
    (lowest,) = [each.version for each in torch_range().specifier if each.operator == ">="]
    command = ("make", "--dry-run", "test-lowest-torch")
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"torch=={lowest}\n" in printed


def test_the_extra_of_workers_on_ray_has_what_a_worker_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [Requirement(each) for each in project["optional-dependencies"]["ray"]]
    assert {"ray", project["name"]} == {each.name for each in extras}
    assert {"engine"} == set().union(*(each.extras for each in extras))
