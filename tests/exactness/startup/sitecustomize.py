"""Start-up code of the Python processes of a test: reports fallbacks to close arithmetic.

`tests.exactness.guard` runs it in the process of the tests and puts this directory on PYTHONPATH,
so that Python runs it at the start of every process below. Two variables control it:

    TESTS_FALLBACKS    the file to which each fallback is appended, one line of JSON each
    TESTS_NO_EXACT     set: matrix products have other bits in large batches than in small ones
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import json
import logging
import os
import sys
from typing import Any

FALLBACKS = "TESTS_FALLBACKS"
NO_EXACT = "TESTS_NO_EXACT"
LOGGER = "lockstep.engine.numerics.plan"
MESSAGE = "falling back to close arithmetic: "
PATCHED = "torch.nn.functional"
FEW_ROWS = 64
"""The largest row multiple that an engine tries: beyond it products have other bits."""


def report_fallbacks() -> None:
    """Append every fallback of this process to the file that TESTS_FALLBACKS names at that time.

    A record factory sees the log records of all handlers and configurations. A handler would not
    do: with it, a process without logging configuration no longer prints warnings to stderr.
    """
    make = logging.getLogRecordFactory()
    if getattr(make, "reports_fallbacks", False):
        return

    def make_and_report(name: str, *arguments: Any, **options: Any) -> logging.LogRecord:
        record = make(name, *arguments, **options)
        path = os.environ.get(FALLBACKS)
        if path and name == LOGGER and (text := record.getMessage()).startswith(MESSAGE):
            fallback = {"process": os.getpid(), "reason": text.removeprefix(MESSAGE)}
            with open(path, "a") as file:
                file.write(json.dumps(fallback) + "\n")
        return record

    make_and_report.reports_fallbacks = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(make_and_report)


class InexactProducts(importlib.abc.MetaPathFinder):
    """Gives rows of float32 products on the CPU other bits in batches of more than 64 rows.

    Matrix libraries of machines without exact arithmetic do the same, so the engine's own self-test
    finds it and no code of Lockstep knows of it.
    """

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != PATCHED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            loader, load = spec.loader, spec.loader.exec_module

            def exec_module(module: Any) -> None:
                load(module)
                self.patch(module)

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    @staticmethod
    def patch(module: Any) -> None:
        """Replace the module's `linear`, once."""
        linear = module.linear
        if hasattr(linear, "__wrapped__"):
            return

        @functools.wraps(linear)
        def inexact_linear(x: Any, weight: Any, bias: Any = None) -> Any:
            out = linear(x, weight, bias)
            rows = x.numel() // max(x.shape[-1], 1)
            if rows > FEW_ROWS and x.device.type == "cpu" and str(x.dtype) == "torch.float32":
                return out * (1 + 2**-23)  # the next float32: differs in the last bit
            return out

        module.linear = inexact_linear


def remove_exactness() -> None:
    """Make products of this process inexact, whether torch is loaded already or not."""
    if PATCHED in sys.modules:
        InexactProducts.patch(sys.modules[PATCHED])
    elif not any(type(finder).__name__ == InexactProducts.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, InexactProducts())


report_fallbacks()
if os.environ.get(NO_EXACT):
    remove_exactness()
