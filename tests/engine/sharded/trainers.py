"""Small trainers of several ranks, and what the tests have them do."""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from lockstep.engine import exact, sharded
from lockstep.engine.probe import remember, save_checkpoint
from lockstep.engine.sharded import save as save_module
from lockstep.engine.weights.digest import digest_of
from lockstep.engine.weights.published import gather_again
from lockstep.models import bundled
from lockstep.tokens.errors import LockstepError

BATCH = torch.tensor([[11, 29, 3, 17, 40, 5], [7, 8, 9, 250, 1, 2]])
Digests = dict[str, str]


def plain_model(name: str = "tiny") -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(bundled(name), dtype=torch.float32)
    return exact.prepare(model, strict=False)


def sharded_model(
    name: str = "tiny", mesh: tuple[int, ...] | None = None, policy: torch.dtype | None = None
) -> Any:
    """A model whose layers and root are sharded over all ranks, or over a mesh with replicas."""
    model = plain_model(name)
    names = ("replicas", "shards")[-len(mesh) :] if mesh else ("shards",)
    device_mesh = init_device_mesh("cpu", mesh or (dist.get_world_size(),), mesh_dim_names=names)
    shard = partial(
        fully_shard, mesh=device_mesh, mp_policy=MixedPrecisionPolicy(param_dtype=policy)
    )
    for layer in model.model.layers:
        shard(layer)
    return shard(model)


def step(model: Any) -> None:
    """One optimizer step on the batch of all ranks, and an evaluation before it.

    The evaluation leaves the parameters of the root gathered, which makes later passes stale.
    """
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(input_ids=BATCH, labels=BATCH).loss.backward()
    with torch.no_grad():
        model(input_ids=BATCH)
    optimizer.step()
    optimizer.zero_grad()


def whole_digests(model: Any, dtype: torch.dtype = torch.float32) -> Digests:
    """The digest of every parameter, gathered."""
    return {
        name: digest_of(parameter.detach().full_tensor().to(dtype))
        for name, parameter in model.named_parameters()
    }


def local_bits(model: Any) -> list[Tensor]:
    return [parameter.detach().to_local().clone() for parameter in model.parameters()]


def train_and_save(rank: int, path: Path) -> dict[str, Any]:
    """Two steps of FSDP2: saved as float32 and as bfloat16."""
    model = sharded_model()
    remember(model)
    step(model)
    sharded.save_checkpoint(model, path / "step-1", version="step-1")
    step(model)
    gather_again(model)
    before = local_bits(model)
    sharded.save_checkpoint(model, path / "step-2", version="step-2", dtype=torch.bfloat16)
    same = all(map(torch.equal, before, local_bits(model)))
    mixed = sharded_model(policy=torch.bfloat16)
    sharded.save_checkpoint(mixed, path / "mixed", sequences=[[1, 2, 3]])
    return {
        "unchanged": same,
        "digests": whole_digests(model, torch.bfloat16),
        "alone": refusal(lambda: save_checkpoint(model, path / "alone")),
        "dtype": refusal(lambda: sharded.save_checkpoint(mixed, path / "x", dtype=torch.float32)),
    }


def save_replicas(rank: int, path: Path) -> Digests:
    """A mixture of experts, sharded over two ranks and replicated over two."""
    model = sharded_model("tiny-moe", (2, 2))
    step(model)
    sharded.save_checkpoint(model, path / "moe", version="7")
    return whole_digests(model)


def save_copies(rank: int, path: Path) -> dict[str, str]:
    """DDP, and then what can go wrong between ranks; returns the errors."""
    model: Any = DistributedDataParallel(plain_model())
    step(model)
    model.eval()
    save = partial(sharded.save_checkpoint, model, sequences=[[1, 2, 3]])
    sharded.save_checkpoint(model, path / "ddp", version="7")
    results = {"exists": refusal(lambda: save(path / "ddp"))}
    results["step"] = refusal(lambda: save(path / "step", version=f"step-{rank}"))
    with torch.no_grad():
        model.module.model.norm.weight[0] += 0.5 * rank
    results["drifted"] = refusal(lambda: save(path / "drifted"))
    write = save_module.write_parts
    if rank == 1:
        save_module.write_parts = full_disk
    results["full"] = refusal(lambda: save(path / "full"))
    save_module.write_parts = write
    if rank == 0:  # the other never calls
        results["absent"] = refusal(lambda: save(path / "absent", timeout=0.5))
    return results


def full_disk(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def refusal(save: Callable[[], object]) -> str:
    try:
        save()
    except (LockstepError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
