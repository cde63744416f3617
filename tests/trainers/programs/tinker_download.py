"""Trains an adapter for one step, saves it, and exports it under a name."""

from __future__ import annotations

import json

import tinker
from tinker import types

IDS = [5, 17, 300, 42, 8]
service = tinker.ServiceClient()
client = service.create_lora_training_client("tiny", rank=4, seed=1)
datum = types.Datum(
    model_input=types.ModelInput.from_ints(IDS[:-1]),
    loss_fn_inputs={"target_tokens": IDS[1:], "weights": [1.0] * 4},
)
client.forward_backward([datum], "cross_entropy")
client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
saved = client.save_state("kept").result().path
exported = client.save_weights_external("shared").result().path
urls = service.create_rest_client().get_external_weights_urls(exported).result().urls
print(json.dumps({"saved": saved, "exported": exported, "urls": urls}))
