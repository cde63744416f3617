"""Run at the start of every Python that finds this directory: writes down when an engine computes.

A benchmark puts the directory on PYTHONPATH of a fleet and names a file in CLOCKED: each worker
appends lines of `begin end what`, by the clock that all processes of a machine share.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any

COMPUTES = {
    "lockstep.engine.core": ("Core", {"step": "step", "score_all": "score"}),
    "lockstep.engine.weights.served": ("ServedWeights", {"load_weights": "load"}),
    "lockstep.worker.prober": ("Prober", {"_score": "score"}),
}
"""The methods in which an engine computes, by module and class."""


class Clock(importlib.abc.MetaPathFinder):
    """Wraps those methods as their modules are imported."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "a", buffering=1)  # noqa: SIM115
        self._lock = threading.Lock()

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in COMPUTES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            loader, load = spec.loader, spec.loader.exec_module

            def exec_module(module: Any) -> None:
                load(module)
                owner, methods = COMPUTES[name]
                for method, what in methods.items():
                    kind = getattr(module, owner)
                    setattr(kind, method, self.timed(getattr(kind, method), what))

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def timed(self, method: Callable[..., Any], what: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            begun = perf_counter()
            try:
                return method(*arguments, **options)
            finally:
                with self._lock:
                    self._file.write(f"{begun} {perf_counter()} {what}\n")

        return call


if path := os.environ.get("CLOCKED"):
    sys.meta_path.insert(0, Clock(path))
