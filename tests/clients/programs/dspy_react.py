"""dspy: a ReAct program with a tool; every step is a prompt of its own."""

import json
import sys

import dspy


def calc(expression: str) -> str:
    """Evaluates an arithmetic expression."""
    return str(eval(expression))


dspy.configure(lm=dspy.LM("openai/tiny", api_base=sys.argv[1], api_key="dummy", cache=False))
react = dspy.ReAct("question -> answer", tools=[calc], max_iters=4)
result = react(question="What is 417 + 86, and then times 3?")
print(json.dumps({"answer": result.answer}))
