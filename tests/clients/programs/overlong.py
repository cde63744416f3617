"""A prompt that is too long, as the openai SDK, litellm and langchain tell it to their callers."""

import json
import sys

import litellm
import openai
from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI

base = sys.argv[1]
messages = [{"role": "user", "content": "word " * 20_000}]
seen = {}
try:
    openai.OpenAI(base_url=base, api_key="dummy").chat.completions.create(
        model="tiny", messages=messages
    )
except openai.BadRequestError as error:
    seen["openai"] = error.code
try:
    litellm.completion(model="openai/tiny", api_base=base, api_key="dummy", messages=messages)
except litellm.ContextWindowExceededError as error:
    seen["litellm"] = type(error).__name__
try:
    ChatOpenAI(model="tiny", base_url=base, api_key="dummy").invoke(messages)
except ContextOverflowError:
    seen["langchain"] = "ContextOverflowError"
print(json.dumps(seen))
