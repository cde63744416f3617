"""pydantic-ai: an Agent with a tool, on OpenAIChatModel; whole or streamed."""

import asyncio
import json
import sys
from collections.abc import AsyncIterable

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

base, stream = sys.argv[1], "stream" in sys.argv[2:]
provider = OpenAIProvider(base_url=base, api_key="dummy")
agent = Agent(OpenAIChatModel("tiny", provider=provider), system_prompt="You calculate.")


@agent.tool_plain
def calc(expression: str) -> str:
    """Evaluates an arithmetic expression."""
    return str(eval(expression))


async def drain(_: object, events: AsyncIterable[object]) -> None:
    async for _event in events:
        pass


async def main() -> str:
    question = "What is 417 + 86, and then times 3?"
    if not stream:
        return (await agent.run(question)).output
    return (await agent.run(question, event_stream_handler=drain)).output


print(json.dumps({"answer": asyncio.run(main())}))
