"""Frames whole responses as streams and reads them back with verifiers' own parsers."""

import json

from verifiers.v1.dialects import DIALECTS

from lockstep.integrations.verifiers import install

install()
usage = {"input_tokens": 3, "output_tokens": 2}
message = {
    "id": "msg_1", "type": "message", "role": "assistant", "model": "tiny", "usage": usage,
    "stop_reason": "tool_use", "stop_sequence": None,
    "content": [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "text", "text": "So:"},
        {"type": "tool_use", "id": "t1", "name": "calc", "input": {"expression": "1 + 2"}},
    ],
}  # fmt: skip
details = {"input_tokens_details": {"cached_tokens": 0},
           "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 5}  # fmt: skip
text = {"type": "output_text", "text": "So:", "annotations": []}
response = {
    "id": "resp_1", "object": "response", "created_at": 1, "model": "tiny", "status": "completed",
    "error": None, "incomplete_details": None, "instructions": None, "metadata": {},
    "parallel_tool_calls": True, "temperature": 1.0, "top_p": 1.0, "tool_choice": "auto",
    "tools": [], "usage": {**usage, **details},
    "output": [
        {"type": "message", "id": "m1", "role": "assistant", "status": "completed",
         "content": [text]},
        {"type": "function_call", "id": "f1", "call_id": "t1", "name": "calc",
         "arguments": '{"expression": "1 + 2"}', "status": "completed"},
    ],
}  # fmt: skip
results = []
for dialect in DIALECTS:
    raw = {"/v1/messages": message, "/v1/responses": response}.get(dialect.routes[0])
    if raw is None:
        continue
    parser = dialect.stream_parser()
    for event in dialect.stream_events(raw):
        parser.feed(event)
    read = parser.finish()
    (call,) = read.message.tool_calls
    results.append(
        [read.message.content, call.name, json.loads(call.arguments), read.finish_reason]
    )
print(json.dumps(results))
