"""What is left of one agent's run behind each proxy: chains, trainable tokens, CPU per turn.

    python -m benchmarks.agent_peers

One run through chat completions, as coding agents make it: a main line of tool turns with thinking,
a sub-agent in the middle, another question, a compaction, and what follows that. Lockstep stands in
front of a scripted worker; OpenEnv's capture proxy and rllm-model-gateway stand in front of a
gateway that renders each history anew and gives ids, as vLLM's chat does. The sampled texts are
the same everywhere, and histories go back as they came, thinking included. verifiers' interception
renders by itself and is in front of that gateway's generate route.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from benchmarks import measure, peers
from benchmarks.conversation import find_model
from benchmarks.gateway.contestants import (
    GATEWAY_CORE,
    OTHER_CORES,
    free_port,
    ready_line,
    running,
    wait_for,
)

Json = dict[str, Any]
TURNS = 12
"""Tool turns of the main line before and after the second question, and after the compaction."""
RUNS = 5
TOOL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Runs a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}
CALL = {"name": "shell", "arguments": {"command": "cat a.txt"}}
RULES = (
    {"when": {"last": "summarise"}, "say": "So far: the files were read."},
    {"when": {"last": "that is all"}, "think": "It is clear now.", "say": "The bug is in add."},
    {"think": "I look further.", "calls": [CALL]},
)
QUESTION = {"return_token_ids": True, "logprobs": True}
RESULT = "def add(a, b):\n    return a - b\n" * 8


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a trainer gets of one run; `tokens` are all that it has to read for it."""

    chains: int
    trainable: int
    tokens: int

    @classmethod
    def of(cls, chains: list[tuple[list[int], int]]) -> Outcome:
        """Of the ids of each chain, and how many of them are trainable."""
        sizes = [len(ids) for ids, _ in chains]
        return cls(len(chains), sum(trainable for _, trainable in chains), sum(sizes))


class Run:
    """Plays the run against one base URL; `sampled` counts the tokens of all its calls."""

    def __init__(self, base: str, key: str, **extra: Any) -> None:
        self._url, self._key, self._extra = f"{base}/chat/completions", key, extra
        self.calls = self.sampled = 0
        self.prompts: list[list[int]] = []
        self.saved = self.prefilled = 0

    def play(self) -> None:
        main = [_message("system", "You are a coding agent."), _message("user", "Mend the bug.")]
        self._tool_turns(main, TURNS)
        child = [_message("system", "You are a helper."), _message("user", "Report the bug.")]
        self._tool_turns(child, 3)
        main.append(_message("user", "And the tests?"))
        self._tool_turns(main, TURNS)
        self._call([*main, _message("user", "Please summarise")], tools=False)
        after = [main[0], _message("user", "So far: the files were read. Go on.")]
        self._tool_turns(after, TURNS)

    def _tool_turns(self, history: list[Json], turns: int) -> None:
        for at in range(turns):
            message = self._call(history)
            last = at == turns - 1
            result = RESULT + ("that is all" if last else f"line {at}")
            history += [message, *(_result(call, result) for call in message["tool_calls"])]
        history.append(self._call(history))

    def _call(self, history: list[Json], *, tools: bool = True) -> Json:
        body = {"model": "m", "messages": history, "max_tokens": 200, "temperature": 1.0}
        body |= {"tools": [TOOL]} if tools else {}
        read = post(self._url, {**body, **self._extra}, self._key)
        self.calls += 1
        self.sampled += read["usage"]["completion_tokens"]
        if ids := read.get("prompt_token_ids"):
            self._count(ids, ids + read["choices"][0]["token_ids"])
        message: Json = read["choices"][0]["message"]
        return message

    def _count(self, prompt: list[int], whole: list[int]) -> None:
        """What an engine need not read again: the longest beginning that it has read before."""
        self.saved += max((_common(prompt, each) for each in self.prompts), default=0)
        self.prefilled += len(prompt)
        self.prompts.append(whole)


def _common(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _message(role: str, text: str) -> Json:
    return {"role": role, "content": text}


def _result(call: Json, text: str) -> Json:
    return {"role": "tool", "tool_call_id": call["id"], "content": text}


def post(url: str, body: Json, key: str = "dummy") -> Json:
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            read: Json = json.loads(response.read())
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{url}: {error.code} {error.read().decode()[:500]}") from None
    return read


def get(url: str, token: str = "dummy") -> Any:
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.loads(response.read())


class Lockstep:
    extra: ClassVar[Json] = {}

    def __init__(self, place: Place) -> None:
        self.port, self.pid, self._admin, self._token = place.gateway()

    def open(self, name: str) -> tuple[str, str]:
        return f"http://127.0.0.1:{self.port}/sessions/{name}/v1", "dummy"

    def read(self, name: str) -> Outcome:
        samples = get(f"{self._admin}/v1/rl/sessions/{name}", self._token)["samples"]
        return Outcome.of([(each["token_ids"], sum(each["sampled_mask"])) for each in samples])


class OpenEnv:
    """Its capture proxy, started by its own command."""

    extra: ClassVar[Json] = {}

    def __init__(self, place: Place) -> None:
        self.port = free_port()
        command = [
            str(peers.python("clients")), "-m", "openenv.core.harness.capture.server",
            "--llm-url", f"{place.upstream}/v1", "--port", str(self.port),
            "--capture-level", "tokens",
        ]  # fmt: skip
        process = place.start(command)
        wait_for(process, f"http://127.0.0.1:{self.port}/health")
        self.pid = process.pid

    def open(self, name: str) -> tuple[str, str]:
        post(f"http://127.0.0.1:{self.port}/sessions", {"session_id": name})
        return f"http://127.0.0.1:{self.port}/v1", name

    def read(self, name: str) -> Outcome:
        rollout = get(f"http://127.0.0.1:{self.port}/sessions/{name}/rollout")
        rows = [each for each in rollout["sequences"] if each.get("trainable", True)]
        return Outcome.of([(each["input_ids"], sum(each["loss_mask"])) for each in rows])


class Rllm:
    """rllm-model-gateway, with its traces in memory; it gives calls, not chains.

    Its own way to ask for ids puts a field `extra_body` into the body, which vLLM passes over and
    the gateway behind it refuses: the run asks for them itself.
    """

    extra: ClassVar[Json] = QUESTION

    def __init__(self, place: Place) -> None:
        self.port = free_port()
        config = place.directory / "rllm.yaml"
        config.write_text("add_return_token_ids: false\n")
        command = [
            str(peers.python("rllm-model-gateway")), "-m", "rllm_model_gateway", "--host",
            "127.0.0.1", "--port", str(self.port), "--worker", f"{place.upstream}/v1",
            "--log-level", "warning", "--store", "memory", "--config", str(config),
        ]  # fmt: skip
        process = place.start(command)
        wait_for(process, f"http://127.0.0.1:{self.port}/health")
        self.pid = process.pid

    def open(self, name: str) -> tuple[str, str]:
        return f"http://127.0.0.1:{self.port}/sessions/{name}/v1", "dummy"

    def read(self, name: str) -> Outcome:
        traces = get(f"http://127.0.0.1:{self.port}/sessions/{name}/traces")
        sampled = [each["completion_token_ids"] for each in traces]
        prompts = [each["prompt_token_ids"] for each in traces]
        pairs = zip(prompts, sampled, strict=True)
        return Outcome.of([(prompt + ids, len(ids)) for prompt, ids in pairs])


class Verifiers:
    """Its interception, which renders and bridges by itself, before the generate route."""

    extra: ClassVar[Json] = {}

    def __init__(self, place: Place) -> None:
        program = str(peers.ROOT / "benchmarks" / "verifiers_interception.py")
        # Without its directory on the path, where `http` would be another package.
        command = [str(peers.python("clients")), "-P", program, place.upstream, place.model]
        self._process = place.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.pid = self._process.pid
        self._rows: list[tuple[list[int], int]] = []

    def open(self, name: str) -> tuple[str, str]:
        opened = ready_line(self._process)
        return f"{opened['url']}/v1", opened["key"]

    def close(self) -> None:
        """Ends the rollout: the server then opens the next."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the server was started without pipes")
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self._rows = json.loads(self._process.stdout.readline())

    def read(self, name: str) -> Outcome:
        return Outcome.of(self._rows)


class Place:
    """The scripted worker, the gateway that stands for vLLM's chat, and what else is started."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.model = str(find_model())
        script = self.directory / "script.jsonl"
        script.write_text("\n".join(map(json.dumps, RULES)))
        worker = self._start_own(
            OTHER_CORES, "worker", self.model, "--script", str(script), "--served-model-name", "m"
        )
        self._worker = ready_line(worker)["url"]
        self.upstream = f"http://127.0.0.1:{self.gateway()[0]}"

    def gateway(self) -> tuple[int, int, str, str]:
        """A gateway in front of the worker: port, pid, URL and token of its control plane."""
        state = tempfile.mkdtemp(dir=self.directory)
        process = self._start_own(
            GATEWAY_CORE, "gateway", "--worker", self._worker, "--tokenizer", self.model,
            "--port", "0", "--admin-port", "0", "--json", "--state-dir", state,
        )  # fmt: skip
        ready = ready_line(process)
        token = Path(ready["admin_token_file"]).read_text().strip()
        return int(ready["url"].rpartition(":")[2]), process.pid, ready["admin_url"], token

    def start(self, command: list[str], **pipes: int) -> subprocess.Popen[str]:
        home = {"HOME": str(self.directory), "PATH": os.environ["PATH"]}
        return self._stack.enter_context(
            running(command, GATEWAY_CORE, cwd=self.directory, env=home, **pipes)
        )

    def _start_own(self, cores: set[int], *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "lockstep", *words]
        return self._stack.enter_context(
            running(command, cores, stdout=subprocess.PIPE, cwd=self.directory)
        )


PROXIES: dict[str, Callable[[Place], Lockstep | OpenEnv | Rllm | Verifiers]] = {
    "lockstep": Lockstep,
    "openenv": OpenEnv,
    "rllm-model-gateway": Rllm,
    "verifiers": Verifiers,
}


def prefill(base: str) -> str:
    """The share of the prompts' tokens that an engine with a prefix cache reads once."""
    run = Run(base, "dummy", **QUESTION)
    run.play()
    return f"{run.saved / run.prefilled:.1%} of {run.prefilled:,}"


def main() -> None:
    with ExitStack() as stack:
        place = Place(stack)
        proxies = {name: start(place) for name, start in PROXIES.items()}
        costs: dict[str, list[float]] = {name: [] for name in proxies}
        for at in range(RUNS):
            for name, proxy in proxies.items():
                run = Run(*proxy.open(f"run{at}"), **proxy.extra)
                before = measure.cpu_seconds(proxy.pid)
                run.play()
                costs[name].append((measure.cpu_seconds(proxy.pid) - before) / run.calls * 1000)
                if isinstance(proxy, Verifiers):
                    proxy.close()
                if at == RUNS - 1:
                    got = proxy.read(f"run{at}")
                    cpu = sorted(costs[name])[RUNS // 2]
                    print(
                        f"{name}: {run.calls} calls, {got.chains} chains of {got.tokens:,} tokens, "
                        f"{got.trainable} of {run.sampled} sampled tokens trainable "
                        f"({got.trainable / run.sampled:.1%}), {cpu:.2f} ms CPU per turn"
                    )
        print("prefill saved, lockstep:", prefill(proxies["lockstep"].open("prefill")[0]))
        print("prefill saved, rendered anew:", prefill(f"{place.upstream}/v1"))


if __name__ == "__main__":
    main()
