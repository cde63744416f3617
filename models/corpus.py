"""The text the tokenizer is trained on: task conversations and sentences written for it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from tasks import CALC_TOOL, TASKS, Message

SENTENCES = """\
You are a helpful assistant.
You are a careful assistant that answers with the number only.
You reverse strings.
You can use a tool to work out the answer.
Please call the tool and then tell me the result.
The quick answer is not always the right answer.
I think the number is higher than the one you said.
The next one is lower, so try again.
That is correct, thank you for the help.
What is the name of the function that you want to call?
How many turns did it take to find the number?
This model is very small and it has seen only a few tasks.
It was trained with text that we wrote for it, and with nothing else.
Each request has a prompt, and each reply has a list of tokens.
The trainer reads the tokens and the server writes them.
When the weights change, the old values are no longer in use.
There is a queue for the requests that wait, and a batch for those that run.
One of the workers stopped, and another one started in its place.
She wrote the first line, he read it out, and they both laughed.
On the second day the rain came down and the river began to rise.
We went to the market in the morning and came home in the evening.
The old house at the end of the street has a green door and a small garden.
Where were you going when the train was late?
Would they have gone there if they had known about it?
My brother and my sister are working on something with their friends.
Some people like tea, others would rather have coffee or just water.
If you can see the light from here, then we are not far from the town.
He could not remember which of the two keys would open the box.
A good test reads as a claim: it says what must hold and then checks it.
To make a copy, open the file, select all of it and save it under a new name.
An error was raised because the value could not be read.
The string contains letters, digits and spaces, for example "abc 123".
{"id": 1, "type": "object", "content": "text", "value": true, "error": null}
{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi there."}
def main(name: str) -> None: return print(name, end="")
"""

_TOOLS: list[dict[str, Any]] = [
    CALC_TOOL,
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search for a text and return the lines that contain it.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "The text to search for."},
                    "limit": {"type": "integer"},
                },
                "required": ["query"],
            },
        },
    },
]


def texts(template: str, seed: int = 0, per_task: int = 40) -> Iterator[str]:
    """Yield the corpus: rendered task conversations and, many times over, the sentences."""
    rng = random.Random(seed)
    for make in TASKS.values():
        for _ in range(per_task):
            episode = make(rng)
            messages = list(episode.opening)
            reply: Message | None = messages[-1]
            while reply is not None:
                text = episode.right()
                messages.append({"role": "assistant", "content": text})
                if (reply := episode.reply(text)) is not None:
                    messages.append(reply)
            yield _render(template, messages, episode.tools)
    opening = [{"role": "system", "content": "You are a helpful assistant."}]
    for _ in range(per_task // 2):
        yield _render(template, opening, _TOOLS)
        yield SENTENCES


def _render(template: str, messages: list[Message], tools: list[dict[str, Any]] | None) -> str:
    rendered, _ = render_jinja_template([messages], tools=tools, chat_template=template)
    return str(rendered[0])
