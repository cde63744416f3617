"""One call of 2,500 datums, as the SDK cuts it up and at once: logprobs after a step of each."""

from __future__ import annotations

import json
import os
import sys

import tinker
from tinker import types


def datum(at: int) -> types.Datum:
    ids = [(at * 7 + place * 13) % 500 for place in range(4 + at % 3)]
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": ids[1:], "weights": [0.01] * (len(ids) - 1)},
    )


def main() -> None:
    service = tinker.ServiceClient()
    data = [datum(at) for at in range(2500)]
    out: dict[str, object] = {}
    for name in ("pieces", "whole"):
        client = service.create_lora_training_client("tiny", rank=4, seed=3)
        if name == "whole":
            holder = client.holder
            config = holder._client_config.model_copy(update={"fwdbwd_max_chunk_len": 10_000})
            holder._client_config = config
        call = client.forward_backward(data, "cross_entropy")
        norm = client.optim_step(types.AdamParams(learning_rate=1e-2)).result().metrics["grad_norm"]
        rows = [each["logprobs"].tolist() for each in call.result().loss_fn_outputs]
        after = client.forward(data[:3], "cross_entropy").result()
        out[name] = {
            "norm": norm,
            "first": rows,
            "after": [each["logprobs"].tolist() for each in after.loss_fn_outputs],
        }
    print(json.dumps(out))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # now and then the SDK's transport aborts while the interpreter ends
