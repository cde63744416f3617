"""TRL: its VLLMClient, made to believe that vLLM is installed beside it."""

import json
import sys
from pathlib import Path

# TRL needs torch, which the environment of the clients does not hold: it is added behind ours.
sys.path.append(sys.argv[2])
from trl.generation import vllm_client

vllm_client.is_vllm_available = lambda **_: True
client = vllm_client.VLLMClient(base_url=sys.argv[1])
info = client.get_server_info()
tool = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Evaluates an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}
client.session.headers["X-Session-ID"] = sys.argv[4]
messages = [{"role": "user", "content": "What is 417 + 86, and then times 3?"}]
chat = client.chat([messages], tools=[tool], max_tokens=200)
ids = chat["prompt_ids"][0] + chat["completion_ids"][0]
for after in json.loads(Path(sys.argv[3]).read_text()):
    prompt = ids + after
    turn = client.generate([prompt], max_tokens=200, logprobs=0)
    ids = prompt + turn["completion_ids"][0]
del client.session.headers["X-Session-ID"]
many = client.generate([prompt, prompt], n=2, max_tokens=4, logprobs=2)
scores = client.get_sequence_logprobs([ids], [len(prompt)], top_logprobs=100)
client.reset_prefix_cache()
print(
    json.dumps(
        {
            "mode": info["model_config"]["logprobs_mode"],
            "world": client.get_world_size(),
            "prompt": chat["prompt_ids"][0],
            "ids": ids,
            "many": [len(each) for each in many["completion_ids"]],
            "sampled": [each[0] for each in turn["logprobs"][0]],
            "scored": [each[0] for each in scores["actual_logprobs"][0]],
            "top": len(scores["logprobs"][0][0]),
        }
    )
)
