"""Forty samplers of one model, each after another step: all of them answer, in any order."""

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
    count = int(sys.argv[1])
    service = tinker.ServiceClient()
    client = service.create_lora_training_client("tiny", rank=4, seed=3)
    prompt = types.ModelInput.from_ints(IDS)
    samplers, trained = [], []
    for _ in range(count):
        client.forward_backward([DATUM], "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        samplers.append(client.save_weights_and_get_sampling_client())
        row = client.forward([DATUM], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
        trained.append(row.tolist())
    first = [sampler.compute_logprobs(prompt) for sampler in samplers]
    sampled = [each.result()[1:] for each in first]
    second = [sampler.compute_logprobs(prompt) for sampler in reversed(samplers)]
    backwards = [each.result()[1:] for each in second]
    print(json.dumps({"trained": trained, "sampled": sampled, "backwards": backwards[::-1]}))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # now and then the SDK's transport aborts while the interpreter ends
