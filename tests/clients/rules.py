"""What the scripted model says: three turns of tool calls for every client, in its own manner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

QUESTION = "What is 417 + 86, and then times 3?"
"""Every client asks this; `calc` answers 503, then 1509."""
ANSWER = "The result is 1509."
NOTHING = "I have nothing to say to that."
CAPITAL = r"capital of (\w+)"
COUNTRY = '{"country": "{{1}}", "capital": "City"}'


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"calls": [{"name": name, "arguments": arguments}]}


def fields(**values: str) -> str:
    """The fields of an answer as dspy reads them."""
    parts = [f"[[ ## {name} ## ]]\n{value}" for name, value in values.items()]
    return "\n\n".join([*parts, "[[ ## completed ## ]]"])


RULES: list[dict[str, Any]] = [
    # mini-swe-agent: one tool, and a command that hands in the work.
    {"when": {"prompt": "MINI TASK", "turn": 0}, "think": "Look.", **call("bash", command="ls")},
    {"when": {"prompt": "MINI TASK", "turn": 1}, **call("bash", command="cat notes.txt")},
    {"when": {"prompt": "MINI TASK", "turn": 2},
     **call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat notes.txt")},
    # smolagents demands a call every time, and ends with a tool of its own.
    {"when": {"prompt": "final_answer", "turn": 0}, **call("calc", expression="417 + 86")},
    {"when": {"prompt": "final_answer", "turn": 1}, **call("calc", expression="503 * 3")},
    {"when": {"prompt": "final_answer"}, **call("final_answer", answer=ANSWER)},
    # dspy writes the fields of its signature between marks of its own.
    {"when": {"prompt": "next_tool_name", "without": "[[ ## observation_0 ## ]]"},
     "say": fields(next_thought="Add.", next_tool_name="calc",
                   next_tool_args='{"expression": "417 + 86"}')},
    {"when": {"prompt": "next_tool_name", "without": "[[ ## observation_1 ## ]]"},
     "say": fields(next_thought="Times.", next_tool_name="calc",
                   next_tool_args='{"expression": "503 * 3"}')},
    {"when": {"prompt": "next_tool_name"},
     "say": fields(next_thought="Done.", next_tool_name="finish", next_tool_args="{}")},
    {"when": {"prompt": "[[ ## observation_1 ## ]]"},
     "say": fields(reasoning="It was calculated.", answer=ANSWER)},
    # instructor: a country by a tool, in a block of JSON, or as bare JSON.
    {"when": {"last": CAPITAL, "prompt": '"name": "Country"'},
     **call("Country", country="{{1}}", capital="City")},
    {"when": {"last": CAPITAL, "prompt": "```json"}, "say": "```json\n" + COUNTRY + "\n```"},
    {"when": {"last": CAPITAL}, "say": COUNTRY},
    # OpenEnv tries whether a tool is called.
    {"when": {"last": "bash tool to list"}, **call("bash", command="ls /tmp")},
    # Everybody else: two calls, then the answer.
    {"when": {"last": "417 \\+ 86", "turn": 0}, "think": "First the sum.",
     **call("calc", expression="417 + 86")},
    {"when": {"last": "503", "turn": 1}, "say": "Now the product.",
     **call("calc", expression="503 * 3")},
    {"when": {"last": "1509", "turn": 2}, "say": ANSWER},
    {"say": NOTHING},
]  # fmt: skip


def write(path: Path) -> Path:
    """The rules as a script file."""
    path.write_text("".join(json.dumps(rule) + "\n" for rule in RULES))
    return path
