"""The openai SDK with everything that shapes an answer: forced calls, a schema, penalties, stop."""

import json
import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1], api_key="dummy")
expression = {"type": "string", "enum": ["417 + 86", "503 * 3"]}
tool = {
    "type": "function",
    "function": {
        "name": "calc",
        "parameters": {
            "type": "object",
            "properties": {"expression": expression},
            "required": ["expression"],
        },
    },
}
schema = {
    "type": "object",
    "properties": {"answer": {"type": "integer", "enum": [503, 1509]}},
    "required": ["answer"],
    "additionalProperties": False,
}
format_ = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
named = {"type": "function", "function": {"name": "calc"}}
messages = [{"role": "user", "content": "What is 417 + 86?"}]
finishes, contents = [], []
for demands in (
    {"tool_choice": "required", "parallel_tool_calls": False},
    {"tool_choice": named, "frequency_penalty": 0.2},
    {"tool_choice": "none", "response_format": format_},
    {"tool_choice": "none", "stop": ["5", "0", "3"], "max_tokens": 30, "logit_bias": {"198": -1}},
):
    choice = client.chat.completions.create(
        model="tiny", messages=messages, tools=[tool], temperature=0.8, top_p=0.95, **demands
    ).choices[0]
    finishes.append(choice.finish_reason)
    contents.append(choice.message.content)
    messages.append({"content": None, **choice.message.model_dump(exclude_none=True)})
    for call in choice.message.tool_calls or ():
        result = str(eval(json.loads(call.function.arguments)["expression"]))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    if not choice.message.tool_calls:
        messages.append({"role": "user", "content": "What is 417 + 86?"})
print(json.dumps({"finishes": finishes, "contents": contents}))
