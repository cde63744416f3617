"""Any trainer: publish weights as an iterator of (name, shard, tensor), here of a toy with two
tensor-parallel ranks.

    lockstep serve tiny
    torchrun --standalone --nproc-per-node 2 examples/sharded/tensor_parallel.py

Each rank has half of every projection: rows of those into heads and hidden units, columns of those
back. Embeddings and norms are on both. An exporter that yields whole tensors on every rank, such as
Megatron-Bridge's `export_hf_weights`, passes None for the shard of each.
"""

import argparse
import asyncio
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import lockstep
from lockstep import exact, sharded
from lockstep.models import bundled

INTO, BACK = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
parser = argparse.ArgumentParser()
parser.add_argument("--out", default="runs/tensor-parallel/step-1")
options = parser.parse_args()
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")


class Half(nn.Module):
    """This rank's rows (axis 0) or columns (axis 1) of a projection."""

    def __init__(self, whole: nn.Linear, axis: int) -> None:
        super().__init__()
        self.axis, self.shape = axis, tuple(whole.weight.shape)
        self.weight = nn.Parameter(whole.weight.detach().chunk(ranks, axis)[rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        if self.axis == 1:  # each rank has a part of every sum
            dist.all_reduce(y)
        return y


model = AutoModelForCausalLM.from_pretrained(bundled("tiny"), dtype=torch.float32)
for module in list(model.modules()):
    for name, child in list(module.named_children()):
        if name in INTO + BACK:
            setattr(module, name, Half(child, int(name in BACK)))
with torch.no_grad():
    model.model.norm.weight *= 1.01  # the optimizer's step


def weights() -> Iterator[tuple[str, sharded.Shard | None, Tensor]]:
    halves = {f"{name}.weight": module for name, module in model.named_modules()
              if isinstance(module, Half)}  # fmt: skip
    for name, parameter in model.named_parameters():
        shard = None  # the same on every rank
        if half := halves.get(name):
            offsets = [0, 0]
            offsets[half.axis] = rank * parameter.shape[half.axis]
            shard = sharded.Shard(tuple(offsets), half.shape)
        yield name, shard, parameter.detach()


@torch.no_grad()
def score(sequences: list[list[int]]) -> list[list[float]]:
    """The logprob of each token after the first: a forward pass in which all ranks take part."""
    return [exact.token_logprobs(model, ids).tolist() for ids in sequences]


sharded.save_tensors(weights(), options.out, model=bundled("tiny"), score=score, version="tp-1")


async def update() -> None:
    async with lockstep.connect_fleet() as fleet:
        operation = await fleet.update_weights(options.out, "tp-1")
        print("serves", operation.version, {k: r.status for k, r in operation.workers.items()})


if rank == 0:
    asyncio.run(update())
dist.destroy_process_group()
