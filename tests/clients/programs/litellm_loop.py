"""litellm: a tool loop on `litellm.completion`, whole or streamed."""

import json
import sys

import litellm

base, stream = sys.argv[1], "stream" in sys.argv[2:]
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
messages = [{"role": "user", "content": "What is 417 + 86, and then times 3?"}]
while True:
    reply = litellm.completion(
        model="openai/tiny", api_base=base, api_key="dummy", messages=messages, tools=tools,
        stream=stream,
    )  # fmt: skip
    if stream:
        reply = litellm.stream_chunk_builder(list(reply), messages=messages)
    message = reply.choices[0].message
    messages.append(message.model_dump())
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        result = str(eval(json.loads(call.function.arguments)["expression"]))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
print(json.dumps({"answer": message.content}))
