"""A small agent for tests: sends one request, and misbehaves according to its task."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request

base_url, task = sys.argv[1:]
kind, _, digits = task.partition(" ")
with open("environment.json", "w") as file:
    json.dump(dict(os.environ), file)


def say(text):
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 24, "temperature": 1}
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        json.dumps(body).encode(),
        {
            "content-type": "application/json",
            "authorization": f"Bearer {os.environ['AGENT_KEY']}",
        },
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]


words = say(f"Reverse: {digits}")
with open("answer.txt", "w") as file:
    file.write(words)
print("the model said", words)
if kind == "fail":
    sys.exit(3)
if kind in ("hang", "stray"):
    # In a new process session, as the shells of some agents are.
    stray = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    with open(os.environ["STRAYS"], "a") as file:
        file.write(f"{stray.pid}\n")
if kind == "hang":
    time.sleep(1000)
while kind == "loop":
    try:
        say("Reverse: 123")
    except urllib.error.HTTPError:
        time.sleep(0.2)
