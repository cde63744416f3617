"""Stand-ins for the CUDA-only packages that SGLang imports on a machine without a GPU.

Python imports this module at its start in every process of the server, because `lockstep.launch`
puts its folder on PYTHONPATH. `sgl_kernel` and `torchvision` have no build for CPUs that the server
needs: attributes of both exist, and calling one of `sgl_kernel` raises NotImplementedError. Tensor
constructors lose `pin_memory`, which SGLang sets for adapters and torch refuses without a GPU.

It imports nothing of Lockstep, which SGLang's environment does not have.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

STUBBED = ("sgl_kernel", "torchvision")
PINNED = ("empty", "zeros", "ones", "full", "tensor")
"""Constructors that SGLang's adapters call with pin_memory=True."""


class Empty(type):
    """A class whose attributes exist and are the class itself."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Kernel(Empty):
    """A kernel without a CPU build: it can be imported, and not called."""

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{cls.__name__} has no build for CPUs")


class StubModule(types.ModuleType):
    """A module in which every name is a stand-in, made when it is first used."""

    __path__ = []  # noqa: RUF012 (an instance variable of the base class)
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        kind = Kernel if self.__name__.startswith("sgl_kernel") else Empty
        stand_in = kind(f"{self.__name__}.{name}", (), {})
        setattr(self, name, stand_in)
        return stand_in


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the stubbed packages, after all real ones."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in STUBBED or _is_availability_check():
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave the module empty."""


class Unpin(importlib.abc.MetaPathFinder):
    """Patches torch once, when `sglang` is first imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> None:
        if name != "sglang":
            return
        sys.meta_path.remove(self)
        torch: Any = importlib.import_module("torch")
        for constructor in PINNED:
            setattr(torch, constructor, _without_pin_memory(getattr(torch, constructor)))
        torch.Tensor.pin_memory = lambda self, *_, **__: self


def _without_pin_memory(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def unpinned(*values: Any, pin_memory: object = None, **options: Any) -> Any:
        return make(*values, **options)

    return unpinned


def _is_availability_check() -> bool:
    """Return whether `importlib.util.find_spec` is asking: the packages are not installed."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and "importlib" in frame.f_code.co_filename:
        code = frame.f_code
        if code.co_name == "find_spec" and code.co_filename.endswith("util>"):
            return True
        frame = frame.f_back
    return False


sys.meta_path[:] = [Unpin(), *sys.meta_path, Stubs()]
