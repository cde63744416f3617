"""A sampler that is saved under a name, and what it samples: its path, its id, tokens, logprobs."""

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
    service = tinker.ServiceClient()
    client = service.create_lora_training_client("tiny", rank=4, seed=3)
    for _ in range(3):
        client.forward_backward([DATUM], "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    path = client.save_weights_for_sampler(name="for-chat").result().path
    sampler = service.create_sampling_client(model_path=path)
    params = types.SamplingParams(max_tokens=8, temperature=1.0, seed=11, stop=[])
    prompt = types.ModelInput.from_ints(IDS[:5])
    (drawn,) = sampler.sample(prompt, num_samples=1, sampling_params=params).result().sequences
    results = {"path": path, "prompt": IDS[:5], "tokens": drawn.tokens, "logprobs": drawn.logprobs}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # now and then the SDK's transport aborts while the interpreter ends
