"""ag2: an Agent with a tool, on OpenAIConfig."""

import asyncio
import json
import sys

from ag2 import Agent, tool
from ag2.config import OpenAIConfig


@tool
def calc(expression: str) -> str:
    """Evaluates an arithmetic expression."""
    return str(eval(expression))


agent = Agent(
    "calculator",
    prompt="You calculate.",
    config=OpenAIConfig(
        model="tiny", base_url=sys.argv[1], api_key="dummy", streaming="stream" in sys.argv[2:]
    ),
    tools=[calc],
)
reply = asyncio.run(agent.ask("What is 417 + 86, and then times 3?"))
print(json.dumps({"answer": reply.body}))
