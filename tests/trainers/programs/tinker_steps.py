"""Three steps of training, and the logprobs after them."""

from __future__ import annotations

import json
import os
import sys

import tinker
from tinker import types

IDS = [5, 17, 300, 42, 8, 99, 120, 7, 33, 250]
DATUM = types.Datum(
    model_input=types.ModelInput.from_ints(IDS[:-1]),
    loss_fn_inputs={"target_tokens": IDS[1:], "weights": [1.0] * (len(IDS) - 1)},
)


def main() -> None:
    client = tinker.ServiceClient().create_lora_training_client("tiny", rank=4, seed=3)
    norms = []
    for _ in range(3):
        call = client.forward_backward([DATUM] * 2, "cross_entropy")
        step = client.optim_step(types.AdamParams(learning_rate=1e-2))
        call.result()
        norms.append(step.result().metrics["grad_norm"])
    sampler = client.save_weights_and_get_sampling_client()
    logprobs = sampler.compute_logprobs(types.ModelInput.from_ints(IDS)).result()
    print(json.dumps({"norms": norms, "logprobs": logprobs}))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # now and then the SDK's transport aborts while the interpreter ends
