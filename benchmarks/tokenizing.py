"""POST /tokenize of a 32k-token chat: CPU of the whole server, beside vLLM 0.32's own route.

Both have the real Qwen3 tokenizer and its chat template, and both must give the same ids. Every
chat is new to both; the second row is the usual case, a chat that comes again with one turn more.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import measure, peers, table
from benchmarks.conversation import find_model, prose
from benchmarks.gateway.contestants import CORES, free_port, ready_line, running
from benchmarks.sessions.bench import upstream_url
from benchmarks.table import Row
from lockstep.launch.vllm import VllmServer
from lockstep.render import Renderer

TOKENS, TURNS = 32_768, 50
ROUNDS = 7
MODEL = "policy"
START_SECONDS = 150.0
Chat = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Contestant:
    """A server that runs."""

    port: int
    pid: int

    def tokenize(self, chat: Chat) -> tuple[float, list[int]]:
        """CPU seconds of all its processes for one request, and the ids."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        body = json.dumps({"model": MODEL, "messages": chat})
        before = self.cpu_seconds()
        connection.request("POST", "/tokenize", body, {"content-type": "application/json"})
        response = connection.getresponse()
        read = response.read()
        spent = self.cpu_seconds() - before
        connection.close()
        if response.status != 200:
            raise RuntimeError(f"/tokenize gave {response.status}: {read[:500]!r}")
        ids: list[int] = json.loads(read)["tokens"]
        return spent, ids

    def cpu_seconds(self) -> float:
        return sum(measure.cpu_seconds(pid) for pid in measure.tree(self.pid))


def rows() -> list[Row]:
    model = find_model()
    renderer = Renderer.load(model)
    with contestants(Path(model)) as (ours, theirs):
        return [
            compared(ours, theirs, "a new chat", fresh(renderer)),
            compared(ours, theirs, "a known chat with one more turn", longer(renderer)),
        ]


def compared(ours: Contestant, theirs: Contestant, what: str, chats: Iterator[Chat]) -> Row:
    """The medians over some chats, each put to both. Raises RuntimeError where the ids differ."""
    chat: Chat = []
    seen: dict[Contestant, list[int]] = {}

    def cost(one: Contestant, follow: Callable[[], Chat]) -> float:
        nonlocal chat
        chat = follow()
        spent, seen[one] = one.tokenize(chat)
        return spent

    def theirs_then_compare() -> float:
        spent = cost(theirs, lambda: chat)
        if seen[ours] != seen[theirs]:
            raise RuntimeError("the two servers give different ids for one chat")
        return spent

    medians = measure.in_turns(
        {"ours": lambda: cost(ours, lambda: next(chats)), "theirs": theirs_then_compare}, ROUNDS
    )
    return Row(
        what=f"POST /tokenize of {len(seen[ours]):,} tokens: {what}",
        against=peers.VERSIONS["vllm"],
        ours=medians["ours"] * 1e3,
        theirs=medians["theirs"] * 1e3,
        unit="ms CPU",
        note="equal ids",
        headline=f"gateway: /tokenize, {what}" if what.startswith("a known") else "",
    )


def fresh(renderer: Renderer) -> Iterator[Chat]:
    """Chats of which no message was seen before."""
    seed = 0
    while True:
        seed += 1
        yield conversation(renderer, seed, TURNS)


def longer(renderer: Renderer) -> Iterator[Chat]:
    """One chat that grows; the first is there to be known."""
    whole = conversation(renderer, 0, TURNS + ROUNDS + 1)
    for turns in range(TURNS, TURNS + ROUNDS + 1):
        yield whole[: 2 * turns - 1]


def conversation(renderer: Renderer, seed: int, turns: int) -> Chat:
    """So many turns of a chat that has its full length with TURNS of them; the last is open."""
    draw, share = random.Random(seed), TOKENS // (2 * TURNS)
    chat = []
    for turn in range(turns):
        chat.append({"role": "user", "content": f"{turn}: {prose(draw, renderer, share)}"})
        chat.append({"role": "assistant", "content": prose(draw, renderer, share)})
    return chat[:-1]


@contextmanager
def contestants(tokenizer: Path) -> Iterator[tuple[Contestant, Contestant]]:
    """Both servers, the slow starter first."""
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        theirs = stack.enter_context(vllm(home, tokenizer))
        yield stack.enter_context(lockstep(home, tokenizer)), theirs


@contextmanager
def lockstep(home: Path, tokenizer: Path) -> Iterator[Contestant]:
    """A gateway before an upstream that gets no request here."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("LOCKSTEP_")}
    with ExitStack() as stack:
        command = [
            sys.executable, "-m", "lockstep", "gateway", "--json", "--port", "0",
            "--admin-port", "0", "--sessions", "memory", "--tokenizer", str(tokenizer),
            "--worker", stack.enter_context(upstream_url(str(tokenizer))),
        ]  # fmt: skip
        process = stack.enter_context(
            running(command, set(CORES), cwd=home, env=environ, stdout=subprocess.PIPE)
        )
        yield Contestant(int(ready_line(process)["url"].rpartition(":")[2]), process.pid)


@contextmanager
def vllm(home: Path, tokenizer: Path) -> Iterator[Contestant]:
    """A vLLM server of a model that has this vocabulary and next to nothing else."""
    model, port = tiny_model(home / MODEL, tokenizer), free_port()
    options = ("--dtype", "float32", "--max-model-len", "40960", "--max-num-seqs", "2")
    environ = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    with (home / "vllm.log").open("w") as log:
        server = VllmServer(
            str(peers.python("vllm")), str(model), str(port), options, environ=environ, log=log
        )
    try:
        if not server.wait_healthy(START_SECONDS):
            raise RuntimeError(f"vLLM did not start: {(home / 'vllm.log').read_text()[-2000:]}")
        yield Contestant(port, server.process.pid)
    finally:
        server.stop()


def tiny_model(target: Path, tokenizer: Path) -> Path:
    """A random Qwen3 of one layer with the tokenizer's vocabulary."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=151_936, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=40_960,
        tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(target)
    for file in tokenizer.iterdir():
        shutil.copy(file, target / file.name)
    return target


if __name__ == "__main__":
    table.main(rows, __doc__)
