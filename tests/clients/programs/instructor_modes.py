"""instructor: three answers of one conversation as objects, in a mode of its choice."""

import json
import sys
from collections.abc import Iterable

import instructor
from openai import OpenAI
from pydantic import BaseModel

base, mode = sys.argv[1], instructor.Mode[sys.argv[2]]


class Country(BaseModel):
    country: str
    capital: str


client = instructor.from_openai(OpenAI(base_url=base, api_key="dummy"), mode=mode)
raw = []
client.on("completion:response", raw.append)
parallel = mode is instructor.Mode.PARALLEL_TOOLS
responses = mode is instructor.Mode.RESPONSES_TOOLS
create = client.responses.create if responses else client.chat.completions.create
messages, countries = [], []
for name in ("France", "Japan", "Peru"):
    messages.append({"role": "user", "content": f"What is the capital of {name}?"})
    answer = create(
        model="tiny", messages=list(messages), max_retries=0,
        response_model=Iterable[Country] if parallel else Country,
    )  # fmt: skip
    countries.append(next(iter(answer)).country if parallel else answer.country)
    if responses:
        messages.clear()  # instructor cannot send items of this API back
        continue
    message = raw[-1].choices[0].message
    messages.append({"content": None, **message.model_dump(exclude_none=True)})
    for call in message.tool_calls or ():
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "noted"})
print(json.dumps({"countries": countries}))
