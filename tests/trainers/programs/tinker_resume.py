"""Trains and saves, waits while its server is killed, and goes on from what was saved."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import tinker
from tinker import types

IDS = [5, 17, 300, 42, 8, 99, 120, 7, 33, 250]
DATUM = types.Datum(
    model_input=types.ModelInput.from_ints(IDS[:-1]),
    loss_fn_inputs={"target_tokens": IDS[1:], "weights": [1.0] * (len(IDS) - 1)},
)


def step(client: Any) -> float:
    loss = client.forward_backward([DATUM], "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    return float(loss.result().metrics["loss:sum"])


def main() -> None:
    service = tinker.ServiceClient()
    client = service.create_lora_training_client("tiny", rank=8)
    sampler = client.save_weights_and_get_sampling_client()
    prompt = types.ModelInput.from_ints(IDS)
    before = sampler.compute_logprobs(prompt).result()
    losses = [step(client) for _ in range(2)]
    path = client.save_state("two").result().path
    losses += [step(client) for _ in range(3)]
    print("saved", flush=True)
    sys.stdin.readline()  # the server was killed and started again
    after = sampler.compute_logprobs(prompt).result()
    try:
        step(client)
        told = "it went on as if nothing had happened"
    except Exception as error:
        told = str(error)
    resumed = service.create_training_client_from_state_with_optimizer(path)
    again = [step(resumed) for _ in range(3)]
    print(
        json.dumps(
            {"same_sampler": before == after, "told": told, "path": path,
             "losses": losses, "again": again}
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # now and then the SDK's transport aborts while the interpreter ends
