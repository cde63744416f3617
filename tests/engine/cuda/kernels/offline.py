"""Compilation of the kernels that the engine's functions launch, for a GPU that is not present.

Call a function of the engine with tensors on the device "meta": every kernel it would launch is
compiled instead. Needs Triton without its interpreter, so its users are separate programs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class _Driver:
    """The part of a GPU driver that Triton needs to compile."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)


def compile_launches(capability: int, receive: Callable[[str, Any], None]) -> None:
    """Compile kernels instead of launching them; `receive` gets the name and the result of each.

    `capability` is the compute capability, for example 90 for Hopper.
    """
    driver.set_active(_Driver(capability))
    early, run = capability >= 90, JITFunction.run

    def compile_only(kernel: Any, *args: Any, **options: Any) -> None:
        options |= {"warmup": True, "enable_fp_fusion": False}
        options |= {"early": early, "launch_pdl": early}
        name = f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"
        receive(name, run(kernel, *args, **options))

    JITFunction.run = compile_only
