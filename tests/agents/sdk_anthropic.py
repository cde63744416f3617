"""A tool loop with Anthropic's SDK, run by the interpreter of the agents: streamed and whole."""

import json
import subprocess
import sys

import anthropic

TOOL = {
    "name": "shell",
    "description": "Runs a command.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
}
client = anthropic.Anthropic(base_url=sys.argv[1], api_key="dummy", max_retries=0)
messages = [{"role": "user", "content": "Write hello to out.txt, then read it back."}]
kinds = []
for turn in range(6):
    request = {"model": "tiny", "max_tokens": 1000, "messages": messages, "tools": [TOOL]}
    if turn % 2:
        reply = client.messages.create(**request)
    else:
        with client.messages.stream(**request) as stream:
            kinds += [event.type for event in stream]
            reply = stream.get_final_message()
    messages.append({"role": "assistant", "content": reply.content})
    calls = [block for block in reply.content if block.type == "tool_use"]
    if not calls:
        break
    results = []
    for call in calls:
        ran = subprocess.run(call.input["command"], shell=True, capture_output=True, text=True)
        results.append({"type": "tool_result", "tool_use_id": call.id, "content": ran.stdout})
    messages.append({"role": "user", "content": results})
count = client.messages.count_tokens(model="tiny", messages=messages[:1], tools=[TOOL])
print(
    json.dumps(
        {
            "text": reply.content[-1].text,
            "stop": reply.stop_reason,
            "kinds": sorted(set(kinds)),
            "counted": count.input_tokens,
        }
    )
)
