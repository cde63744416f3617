"""A run of openai-agents over responses or chat: whole, streamed, or by the response before."""

import asyncio
import subprocess
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI


@function_tool
def shell(command: str) -> str:
    """Runs a command."""
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout


async def main(url: str, kind: str) -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="dummy", max_retries=0)
    model = OpenAIChatCompletionsModel if kind == "chat" else OpenAIResponsesModel
    agent = Agent(
        name="coder",
        instructions="You write code.",
        model=model("tiny", openai_client=client),
        tools=[shell],
    )
    task = "Write hello to out.txt, then read it back."
    if kind == "streamed":
        result = Runner.run_streamed(agent, task)
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, task, auto_previous_response_id=kind == "previous")
    print(result.final_output)


asyncio.run(main(sys.argv[1], sys.argv[2]))
