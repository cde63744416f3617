"""smolagents: a ToolCallingAgent on OpenAIModel."""

import json
import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def calc(expression: str) -> str:
    """Evaluates an arithmetic expression.

    Args:
        expression: such as 1 + 2
    """
    return str(eval(expression))


model = OpenAIModel(model_id="tiny", api_base=sys.argv[1], api_key="dummy")
agent = ToolCallingAgent(tools=[calc], model=model, verbosity_level=0)
answer = agent.run("What is 417 + 86, and then times 3?", stream="stream" in sys.argv[2:])
if "stream" in sys.argv[2:]:
    *_, last = answer
    answer = last.output
print(json.dumps({"answer": answer}))
