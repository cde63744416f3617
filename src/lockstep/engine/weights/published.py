"""Makes a model compute with exactly the weights that are published, while it is probed.

Two things could make it compute with others. FSDP2 leaves the root's parameters gathered after a
forward pass without gradients, and does not gather them again after an optimizer step. And weights
that are published as bfloat16 are not the float32 ones of the trainer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.tokens.errors import BadRequest


@contextmanager
def published_weights(model: Any, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Gather the current weights in each forward pass of the block, rounded to `dtype`.

    At most one module is rounded at a time. Afterwards every parameter has its bits of before.
    """
    gather_again(model)
    with ExitStack() as stack, torch.no_grad():
        stack.callback(gather_again, model)
        if dtype is not None:
            for module in model.modules():
                own = module.parameters(recurse=False)
                if any(_changes(parameter, dtype) for parameter in own):
                    for hook in _round_during_forward(module, dtype):
                        stack.callback(hook.remove)
        yield


def computed_dtype(model: Any) -> torch.dtype | None:
    """Return the dtype to which FSDP2 casts the parameters for a forward pass, if it does.

    Raises BadRequest when it has several, because then no dtype of a checkpoint is right.
    """
    dtypes = {module._get_fsdp_state()._mp_policy.param_dtype for module in _fsdp_modules(model)}
    dtypes.discard(None)
    if len(dtypes) > 1:
        raise BadRequest(
            f"the mixed precision policies of the model cast to {sorted(map(str, dtypes))}: use "
            "one param_dtype for all of its modules",
            param="dtype",
        )
    return next(iter(dtypes), None)


def is_sharded(model: Any) -> bool:
    """Return whether this rank has only slices of some parameters."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and any(
        isinstance(parameter, tensors.DTensor) for parameter in model.parameters()
    )


def own_rows(model: Any) -> list[Tensor]:
    """Return what this rank has of each parameter, in the memory that it is trained in."""
    gather_again(model)
    tensors = sys.modules.get("torch.distributed.tensor")
    return [
        own.detach().to_local() if tensors and isinstance(own, tensors.DTensor) else own.detach()
        for own in model.parameters()
    ]


def gather_again(model: Any) -> None:
    """Drop gathered parameters: the model has its slices again, and gathers the current weights in
    the next forward pass.
    """
    for module in _fsdp_modules(model):
        module.reshard()


def _fsdp_modules(model: Any) -> Iterator[Any]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:  # without the import, nothing can be sharded by it
        yield from (module for module in model.modules() if isinstance(module, fsdp.FSDPModule))


def _changes(parameter: Tensor, dtype: torch.dtype) -> bool:
    return parameter.is_floating_point() and parameter.dtype != dtype


def _round_during_forward(module: nn.Module, dtype: torch.dtype) -> list[Any]:
    """Round the module's own parameters before its forward pass, and restore them after it."""
    stored: list[tuple[Tensor, Tensor]] = []

    def round_own(*_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if _changes(parameter, dtype):
                stored.append((parameter, parameter.detach().clone()))
                parameter.copy_(parameter.to(dtype))

    def restore(*_: Any) -> None:
        while stored:
            parameter, value = stored.pop()
            parameter.copy_(value)

    # After FSDP2 has gathered the parameters of the module, and before it frees them.
    return [
        module.register_forward_pre_hook(round_own),
        module.register_forward_hook(restore, prepend=True, always_call=True),
    ]
