"""Print the lockstep modules that one chat turn passes in the gateway's process.

    python scripts/turn_modules.py                  the modules by folder, and their number
    python scripts/turn_modules.py --stream         the same for a streamed turn
    python scripts/turn_modules.py --at-most 55     exit 1 when there are more

A worker process with the bundled model and a gateway in this process serve a session of chat turns.
The first two turns are a warm-up. A module counts when one of its functions ran, in any thread,
during each of the turns after them: health checks and timers that fall into one turn do not count.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

from lockstep.fleet.routing.pool import Pool
from lockstep.gateway.app import data_app
from lockstep.gateway.context import GatewayContext
from lockstep.gateway.metrics import GatewayMetrics
from lockstep.gateway.model_registry import ModelRegistry
from lockstep.gateway.options import GatewayOptions
from lockstep.gateway.sessions.sessions import Sessions
from lockstep.http.server.server import listen, serving, url_of

WARM_UP, TURNS = 2, 4
QUESTIONS = ("1 + 2 =", "3 + 4 =", "reverse: abc", "5 + 6 =", "7 + 1 =", "2 + 2 =")


class Recorder:
    """The modules whose functions are called between `start` and `stop`."""

    def __init__(self) -> None:
        self._modules: set[str] | None = None
        # Threads take the hook when they start, so it is set before any pool exists.
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def start(self) -> None:
        self._modules = set()

    def stop(self) -> set[str]:
        modules, self._modules = self._modules or set(), None
        return modules

    def _on_event(self, frame: FrameType, event: str, _: Any) -> None:
        if self._modules is not None and event == "call":
            # Constructors that dataclasses generate have no file: creating a value is no hop.
            name = frame.f_globals.get("__name__", "")
            if name.startswith("lockstep.") and frame.f_code.co_filename.endswith(".py"):
                self._modules.add(name)


@contextmanager
def worker_process() -> Iterator[str]:
    """Start a worker with the bundled model and yield its URL."""
    command = [sys.executable, "-m", "lockstep", "worker", "tiny"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline() if process.stdout else ""
        yield json.loads(line)["url"]
    finally:
        process.terminate()
        process.wait(60)


@asynccontextmanager
async def gateway(worker_url: str) -> AsyncIterator[str]:
    """Serve the data plane of a gateway in this process and yield its URL."""
    async with Pool() as pool, Sessions() as sessions:
        await pool.add(worker_url)
        context = GatewayContext(
            pool=pool, models=ModelRegistry(pool.models, "tiny"), sessions=sessions
        )
        app = data_app(context, GatewayOptions(), GatewayMetrics(context))
        with listen("127.0.0.1", 0) as sock:
            async with serving([(app, sock)]):
                yield url_of(sock)


class Conversation:
    """The client: it sends the whole history with each turn, over one connection."""

    def __init__(self, url: str, *, stream: bool) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc)
        self._stream = stream
        self._messages: list[dict[str, Any]] = []

    def turn(self, text: str) -> None:
        """Send one turn and read its response to the end."""
        self._messages.append({"role": "user", "content": text})
        body = {"messages": self._messages, "max_tokens": 16, "logprobs": True}
        if self._stream:
            body["stream"] = True
        headers = {"content-type": "application/json", "x-session-id": "turn-modules"}
        self._connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = self._connection.getresponse()
        raw = response.read()
        if response.status != 200:
            raise SystemExit(f"the gateway returned {response.status}: {raw.decode()}")
        self._messages.append({"role": "assistant", "content": self._content(raw)})

    def _content(self, raw: bytes) -> str:
        if not self._stream:
            return str(json.loads(raw)["choices"][0]["message"]["content"])
        events = [line[6:] for line in raw.split(b"\n") if line.startswith(b"data: {")]
        deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
        return "".join(delta.get("content") or "" for delta in deltas)


async def modules_of_turn(*, stream: bool) -> set[str]:
    """Return the modules that every recorded turn passes."""
    recorder = Recorder()
    recorded: list[set[str]] = []
    with worker_process() as worker_url:
        async with gateway(worker_url) as url:
            conversation = Conversation(url, stream=stream)
            for number, question in enumerate(QUESTIONS[: WARM_UP + TURNS]):
                recorder.start()
                await asyncio.to_thread(conversation.turn, question)
                modules = recorder.stop()
                if number >= WARM_UP:
                    recorded.append(modules)
    sys.setprofile(None)
    return set.intersection(*recorded)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stream", action="store_true", help="send streamed turns")
    parser.add_argument("--at-most", type=int, help="exit 1 when a turn passes more modules")
    options = parser.parse_args()
    modules = asyncio.run(modules_of_turn(stream=options.stream))
    folders: dict[str, list[str]] = defaultdict(list)
    for name in sorted(modules):
        folder, _, module = name.removeprefix("lockstep.").rpartition(".")
        folders[folder or "lockstep"].append(module)
    for folder, names in sorted(folders.items()):
        print(f"{folder.replace('.', '/') + '/':24} {len(names):3}  {', '.join(names)}")
    print(f"{len(modules)} modules")
    if options.at_most is not None and len(modules) > options.at_most:
        raise SystemExit(f"a chat turn passes {len(modules)} modules: at most {options.at_most}")


if __name__ == "__main__":
    main()
