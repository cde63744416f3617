"""openai-agents: `Runner.run` with a function tool, on the chat API; whole or streamed."""

import asyncio
import json
import sys

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

base, stream = sys.argv[1], "stream" in sys.argv[2:]
set_tracing_disabled(True)


@function_tool
def calc(expression: str) -> str:
    """Evaluates an arithmetic expression."""
    return str(eval(expression))


client = AsyncOpenAI(base_url=base, api_key="dummy")
agent = Agent(
    name="Calculator",
    instructions="You calculate.",
    tools=[calc],
    model=OpenAIChatCompletionsModel(model="tiny", openai_client=client),
)


async def main() -> str:
    question = "What is 417 + 86, and then times 3?"
    if not stream:
        return (await Runner.run(agent, question)).final_output
    running = Runner.run_streamed(agent, question)
    async for _ in running.stream_events():
        pass
    return running.final_output


print(json.dumps({"answer": asyncio.run(main())}))
