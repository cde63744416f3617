"""The anthropic SDK's tool runner with its defaults, which continues a thread of the server."""

import json
import sys

import httpx2
from anthropic import Anthropic, beta_tool

base, how = sys.argv[1:3]
sent = []


@beta_tool
def calc(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: What to evaluate.
    """
    return str(eval(expression))


def record(request: httpx2.Request) -> None:
    body = json.loads(request.content)
    sent.append([body["thread"]["type"], len(body["messages"])])


client = Anthropic(
    base_url=base,
    api_key="dummy",
    max_retries=0,
    http_client=httpx2.Client(event_hooks={"request": [record]}),
)
runner = client.beta.messages.tool_runner(
    model="tiny",
    max_tokens=1000,
    system="You calculate.",
    tools=[calc],
    messages=[{"role": "user", "content": "What is 417 + 86, and then times 3?"}],
    stream=how == "stream",
)
last = None
for part in runner:
    last = part.get_final_message() if how == "stream" else part
print(json.dumps({"answer": last.content[-1].text, "sent": sent}))
