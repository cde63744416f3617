"""CPU time of a turn of a long agent session in each dialect, and of rendering it again.

    python -m benchmarks.agents

One session per dialect, grown to 30,000 tokens by tool turns through a scripted worker; then short
turns that continue it, not streamed. The CPU is the gateway's; worker and client have another core.
Rendering again is what a proxy without a record of ids must do each turn: the whole history by
`renderers`, template and tokenizer alone, without HTTP, checks or a store.
"""

from __future__ import annotations

import http.client
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import renderers

from benchmarks import measure, table
from benchmarks.conversation import WORDS, find_model
from benchmarks.gateway.contestants import GATEWAY_CORE, OTHER_CORES, ready_line, running
from benchmarks.table import Row
from lockstep.render import Renderer
from lockstep.render.messages import plain_messages, plain_tools

TOKENS = 30_000
ROUNDS, CALLS = 7, 20
"""Of so many next turns each."""
WORDS_EACH = 250
"""Of one tool result."""
RULES = (
    {"when": {"last": "go on"}, "say": "Done."},
    {"think": "I look further.", "calls": [{"name": "shell", "arguments": {"command": "cat a"}}]},
)
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
Json = dict[str, Any]


class Dialect:
    """One session of one dialect: grows it turn by turn, and sends its next turn."""

    def __init__(self, name: str, port: int) -> None:
        self.name, self.tokens = name, 0
        self._random = random.Random(0)
        self.history: list[Json] = [{"role": "user", "content": "Look at the files. " * 40}]
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        self._http.request("GET", "/v1/models")
        self._model = json.loads(self._http.getresponse().read())["data"][0]["id"]

    def grow(self) -> None:
        """Takes tool turns until the prompt has its tokens."""
        while self.tokens < TOKENS:
            self._append(
                self._send(self.history), " ".join(self._random.choices(WORDS, k=WORDS_EACH))
            )

    def next_turn(self) -> None:
        self.history.append({"role": "user", "content": "go on"})
        self._append(self._send(self.history))

    def body(self, history: list[Json]) -> tuple[str, Json]:
        tool = {"name": "shell", "description": "Runs a command."}
        if self.name == "chat":
            tools: Any = [{"type": "function", "function": {**tool, "parameters": SCHEMA}}]
            return "chat/completions", {"messages": history, "tools": tools, "max_tokens": 200}
        if self.name == "messages":
            tools = [{**tool, "input_schema": SCHEMA}]
            return "messages", {"messages": history, "tools": tools, "max_tokens": 200}
        tools = [{"type": "function", **tool, "parameters": SCHEMA}]
        return "responses", {"input": history, "tools": tools, "store": False}

    def _send(self, history: list[Json]) -> Json:
        path, body = self.body(history)
        raw = json.dumps({"model": self._model, **body})
        headers = {"content-type": "application/json", "x-session-id": self.name}
        self._http.request("POST", f"/v1/{path}", raw, headers)
        response = self._http.getresponse()
        read: Json = json.loads(response.read())
        if response.status != 200 or response.getheader("x-lockstep-break"):
            raise RuntimeError(f"{self.name}: {response.status} {read}")
        return read

    def _append(self, reply: Json, result: str | None = None) -> None:
        """Adds a reply to the history and, where it made a call, the result of that."""
        usage = reply["usage"]
        self.tokens = usage.get("prompt_tokens", usage.get("input_tokens"))
        if self.name == "chat":
            message = reply["choices"][0]["message"]
            self.history.append(message)
            for call in message.get("tool_calls") or ():
                self.history.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        elif self.name == "messages":
            self.history.append({"role": "assistant", "content": reply["content"]})
            results = [
                {"type": "tool_result", "tool_use_id": each["id"], "content": result}
                for each in reply["content"]
                if each["type"] == "tool_use"
            ]
            if results:
                self.history.append({"role": "user", "content": results})
        else:
            self.history += reply["output"]
            self.history += [
                {"type": "function_call_output", "call_id": each["call_id"], "output": result}
                for each in reply["output"]
                if "call_id" in each
            ]


def rendering(model: Path | str, history: list[Json], tools: list[Json]) -> Callable[[], float]:
    """CPU seconds of rendering the whole history, with nothing of it remembered."""
    own = Renderer.load(model)
    peer = renderers.create_renderer(own.tokenizer, renderers.Qwen3RendererConfig())
    plain, specs = plain_messages(history), plain_tools(tools)

    def once() -> float:
        begun = time.process_time()
        peer.render_ids(plain, tools=specs, add_generation_prompt=True)
        return time.process_time() - begun

    return once


def rows() -> list[Row]:
    model = find_model()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        script = directory / "script.jsonl"
        script.write_text("\n".join(map(json.dumps, RULES)))
        lockstep = [sys.executable, "-m", "lockstep"]
        worker = stack.enter_context(
            running([*lockstep, "worker", str(model), "--script", str(script)], OTHER_CORES,
                    stdout=subprocess.PIPE, cwd=directory)
        )  # fmt: skip
        gateway = stack.enter_context(
            running([*lockstep, "gateway", "--worker", ready_line(worker)["url"], "--tokenizer",
                     str(model), "--port", "0", "--admin-port", "0", "--json", "--state-dir",
                     str(directory / "state")],
                    GATEWAY_CORE, stdout=subprocess.PIPE, cwd=directory)
        )  # fmt: skip
        port = int(ready_line(gateway)["url"].rpartition(":")[2])
        dialects = [Dialect(name, port) for name in ("chat", "messages", "responses")]
        for dialect in dialects:
            dialect.grow()

        def cost_of(dialect: Dialect) -> Callable[[], float]:
            def cost() -> float:
                before = measure.cpu_seconds(gateway.pid)
                for _ in range(CALLS):
                    dialect.next_turn()
                return (measure.cpu_seconds(gateway.pid) - before) / CALLS

            return cost

        contestants = {dialect.name: cost_of(dialect) for dialect in dialects}
        chat = dialects[0]
        contestants["again"] = rendering(model, chat.history, chat.body([])[1]["tools"])
        costs = measure.in_turns(contestants, ROUNDS)
        milliseconds = {name: value * 1000 for name, value in costs.items()}
    return [
        Row(
            what=f"a turn of an agent session of {TOKENS:,} tokens, {name}",
            against="rendering the history again",
            ours=milliseconds[name],
            theirs=milliseconds["again"],
            unit="ms CPU",
            at_most=1 / 30,
            headline=f"gateway: a turn of an agent session of {TOKENS:,} tokens, {name}"
            if name == "chat"
            else "",
        )
        for name in ("chat", "messages", "responses")
    ]


if __name__ == "__main__":
    table.main(rows, __doc__)
