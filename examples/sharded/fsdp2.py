"""GRPO on two or more ranks with FSDP2 by hand; every rank writes its own slices of the weights.

    lockstep serve tiny
    torchrun --standalone --nproc-per-node 2 examples/sharded/fsdp2.py --steps 3

Each rank samples its own rollouts from the fleet and learns from them. Rank 0 updates the fleet.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import lockstep
from lockstep import exact, probe, sharded
from lockstep.models import bundled

parser = argparse.ArgumentParser()
parser.add_argument("--url", default="http://127.0.0.1:8000")
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--out", default="runs/fsdp2")
options = parser.parse_args()

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (ranks,))
model = AutoModelForCausalLM.from_pretrained(bundled("tiny"), dtype=torch.float32)
model = exact.prepare(model, strict=False)  # before the model is sharded
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
probe.remember(model)  # the fleet serves these weights now


async def train() -> None:
    async with lockstep.connect(options.url) as policy, lockstep.connect_fleet() as fleet:
        for step in range(1, options.steps + 1):
            prompts = ["Reverse: 40213"] * 8
            turns = await policy.map(
                prompts, max_tokens=16, temperature=1.0, seed=step * ranks + rank
            )
            rewards = torch.tensor([float("31204" in turn.text) for (turn,) in turns])
            loss, worst = torch.zeros(()), 0.0
            # All rollouts in one pass: every rank must make the same number of passes.
            rows = exact.token_logprobs(
                model, [turn.prompt_ids + turn.token_ids for (turn,) in turns]
            )
            for (turn,), row, reward in zip(turns, rows, rewards, strict=True):
                new, old = row[-len(turn.token_ids) :], torch.tensor(turn.logprobs)
                worst = max(worst, float((new.detach() - old).abs().max()))
                loss = loss - ((reward - rewards.mean()) * (new - old).exp()).mean() / len(turns)
            loss.backward()  # FSDP2 averages the gradients of all ranks
            optimizer.step()
            optimizer.zero_grad()
            directory = f"{options.out}/step-{step}"
            sharded.save_checkpoint(model, directory, version=f"step-{step}")  # every rank calls it
            if rank == 0:
                operation = await fleet.update_weights(directory, f"step-{step}")
                print(f"step {step}: serves {operation.version}, logprobs differ by {worst}")
            dist.barrier()  # sample again when the fleet has answered


if __name__ == "__main__":
    import asyncio

    asyncio.run(train())
    dist.destroy_process_group()
