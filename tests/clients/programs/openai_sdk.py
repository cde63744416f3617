"""The openai SDK: a tool loop, whole or streamed."""

import json
import sys

from openai import OpenAI

base, stream = sys.argv[1], "stream" in sys.argv[2:]
client = OpenAI(base_url=base, api_key="dummy")
tools = [
    {
        "type": "function",
        "function": {
            "name": "calc",
            "description": "Evaluates an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]
messages = [
    {"role": "system", "content": "You calculate."},
    {"role": "user", "content": "What is 417 + 86, and then times 3?"},
]
while True:
    if stream:
        with client.chat.completions.stream(
            model="tiny", messages=messages, tools=tools
        ) as running:
            for _ in running:
                pass
            message = running.get_final_completion().choices[0].message
    else:
        reply = client.chat.completions.create(model="tiny", messages=messages, tools=tools)
        message = reply.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        result = str(eval(json.loads(call.function.arguments)["expression"]))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
print(json.dumps({"answer": message.content}))
