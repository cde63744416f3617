"""Loading of a whole set of weights into a running vLLM model, with repairs of vLLM's CPU paths.

vLLM moves all parameters to the meta device while it reloads. A forward pass in between crashes the
server, so `load` runs from start to end in one call, and restores the old weights when it fails.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform

from lockstep.tokens.errors import BadRequest, EngineFailure, WeightsLost

SKIP_REPAIRS = "LOCKSTEP_VLLM_SKIP_REPAIRS"
"""Names of repairs to skip, separated by commas, to see whether vLLM still needs them."""

Tensors = Mapping[str, Any]


def load(model: Any, model_config: Any, new: Tensors, old: Tensors) -> None:
    """Make the model compute with `new`. On failure raise EngineFailure; it then computes with
    `old`.

    Both hold every tensor of the checkpoint: with a part of a fused module, vLLM would silently
    compute garbage. Raises WeightsLost when `old` could not be loaded again either.
    """
    repairs = repairs_to_run()
    try:
        _load(model, model_config, new, repairs)
    except Exception as error:
        # Some modules are on the meta device now. They must be off it before anything else runs:
        # vLLM's next forward pass on a meta tensor kills the process.
        try:
            _abandon(model, model_config)
            _load(model, model_config, old, repairs)
        except Exception as second:
            raise WeightsLost(
                f"loading failed ({_describe(error)}), and so did restoring the old weights "
                f"({_describe(second)}): restart this server"
            ) from error
        raise EngineFailure(
            f"loading failed, and the old weights were restored: {_describe(error)}"
        ) from error


def repairs_to_run() -> list[Callable[[Any], None]]:
    """Return the repairs for this platform. Raises BadRequest for an unknown name in
    SKIP_REPAIRS."""
    skipped = {name.strip() for name in os.environ.get(SKIP_REPAIRS, "").split(",")} - {""}
    if unknown := skipped - REPAIRS.keys():
        raise BadRequest(
            f"{SKIP_REPAIRS} names {', '.join(sorted(unknown))}, expected {', '.join(REPAIRS)}",
            param=SKIP_REPAIRS,
        )
    if not current_platform.is_cpu():
        return []
    return [repair for name, repair in REPAIRS.items() if name not in skipped]


def _load(
    model: Any, model_config: Any, tensors: Tensors, repairs: list[Callable[[Any], None]]
) -> None:
    initialize_layerwise_reload(model)
    model.load_weights(iter(tensors.items()))
    finalize_layerwise_reload(model, model_config)
    for repair in repairs:
        repair(model)


def _abandon(model: Any, model_config: Any) -> None:
    """Move all modules off the meta device, whatever they had received."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights.clear()
            info.load_numel = 0
    finalize_layerwise_reload(model, model_config)


def _repair_head(model: Any) -> None:
    """Pack the weights of a tied head again.

    A head that shares the embedding's parameter multiplies with a copy packed at the start. The
    reload finds nothing to load for it, and leaves that copy as it is.
    """
    for module in model.modules():
        packed = isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear")
        if packed and module.weight.numel():
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def _repair_experts(model: Any) -> None:
    """Pack expert weights again: the reload writes them unpacked where the kernel reads packed
    ones."""
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and hasattr(module, "w13_weight"):
            kernel.fused_experts.process_weights_after_loading(module)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


REPAIRS: dict[str, Callable[[Any], None]] = {
    "tied_head": _repair_head,
    "experts": _repair_experts,
}
