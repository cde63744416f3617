"""The public API: what README, docs and examples import is in this list, and the list exists.

Everything else in the package is private and may change in any release.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module

import pytest

import lockstep
from tests.docs.blocks import ROOT

PUBLIC = {
    "lockstep": {
        "Chat", "Completion", "LockstepError", "Policy", "Sample", "Sampling", "Scores",
        "ShapedSpan", "Turn", "VersionSpan", "connect", "connect_fleet", "connect_sync", "errors",
        "exact", "explain", "generate", "models", "probe", "sharded", "stores",
    },
    "lockstep.explain": {"Case", "Cause", "CauseEvidence", "Explanation", "explain"},
    "lockstep.exact": {
        "check_plan", "own_plan", "prepare", "sample_logprobs", "token_logprobs",
    },
    "lockstep.probe": {"remember", "save_adapter", "save_checkpoint", "write_probe"},
    "lockstep.sharded": {"Shard", "save_checkpoint", "save_tensors"},
    "lockstep.stores": {"upload"},
    "lockstep.models": {"bundled"},
    "lockstep.engine": {"Engine", "EngineOptions", "EngineRequest", "ModelConfig", "StreamedToken"},
    "lockstep.train": {
        "CALC_TOOL", "Calc", "Environment", "Evaluation", "Reverse", "Reward", "RolloutContext",
        "RunResult", "StepMetrics", "Task", "TrainConfig", "Trainer", "load_environment",
        "run_calc", "write_report",
    },
    "lockstep.integrations.ray": {"RayFleet"},
    "lockstep.integrations.trl": {
        "LockstepGeneration", "LockstepRolloutWorker", "LockstepWeightTransfer", "ServedPolicy",
        "enable_cpu",
    },
    "lockstep.integrations.verifiers": {
        "LockstepClient", "VerifiersEnvironment", "install", "trace_samples",
    },
}  # fmt: skip
"""The public modules, and the public names of each."""
SUBMODULES = ("exact", "explain", "models", "probe", "sharded", "stores")
OTHER_PACKAGES = ("lockstep.integrations.ray", "lockstep.integrations.verifiers")
"""Modules whose packages are not in the environment of this test."""
PYTHON_BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


def shown_code() -> Iterator[tuple[str, str]]:
    """Yield the Python of README, docs and examples, with where each piece is."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for match in PYTHON_BLOCK.finditer(path.read_text("utf-8")):
            indent, code = match[1], match[2]
            yield str(path.relative_to(ROOT)), re.sub(f"^{indent}", "", code, flags=re.MULTILINE)
    for path in sorted((ROOT / "examples").rglob("*.py")):
        yield str(path.relative_to(ROOT)), path.read_text("utf-8")


def shown_names(code: str) -> Iterator[tuple[str, str]]:
    """Yield the names of the package that code uses, each with the module it takes them from."""
    tree = ast.parse(code)
    nodes = list(ast.walk(tree))
    variables = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    modules = {} if "lockstep" in variables else {"lockstep": "lockstep"}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "lockstep":
            for alias in node.names:
                yield str(node.module), alias.name
                if node.module == "lockstep" and alias.name in SUBMODULES:
                    modules[alias.asname or alias.name] = f"lockstep.{alias.name}"
    for node in nodes:
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if owner in modules:
                yield modules[owner], node.attr
            elif owner.startswith("lockstep.") and owner in PUBLIC:
                yield owner, node.attr


def test_what_docs_and_examples_show_is_public() -> None:
    pieces = list(shown_code())
    private = [
        f"{where}: {module}.{name}"
        for where, code in pieces
        for module, name in shown_names(code)
        if name not in PUBLIC.get(module, ()) and f"{module}.{name}" not in PUBLIC
    ]
    assert len(pieces) > 20
    assert private == []


@pytest.mark.parametrize("module", [name for name in PUBLIC if name not in OTHER_PACKAGES])
def test_every_public_name_exists(module: str) -> None:
    submodule = module.removeprefix("lockstep.")
    if submodule in SUBMODULES:
        loaded = getattr(lockstep, submodule)
    else:
        loaded = import_module(module)
        if hasattr(loaded, "__all__"):
            assert set(loaded.__all__) == PUBLIC[module]
    assert [name for name in PUBLIC[module] if not hasattr(loaded, name)] == []
