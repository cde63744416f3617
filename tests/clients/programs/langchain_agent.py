"""langchain: `create_agent` with a tool, on ChatOpenAI; whole or streamed."""

import json
import sys

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

base, stream = sys.argv[1], "stream" in sys.argv[2:]


@tool
def calc(expression: str) -> str:
    """Evaluates an arithmetic expression."""
    return str(eval(expression))


model = ChatOpenAI(model="tiny", base_url=base, api_key="dummy", streaming=stream)
agent = create_agent(model, tools=[calc], system_prompt="You calculate.")
question = {"role": "user", "content": "What is 417 + 86, and then times 3?"}
result = agent.invoke({"messages": [question]})
print(json.dumps({"answer": result["messages"][-1].content}))
