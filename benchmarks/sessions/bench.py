"""What sessions cost a gateway in memory: 10,000 of 20 turns, beside rllm-model-gateway 0.1.0.

Real processes before one upstream that responds at once, the same conversations for each. Memory is
read at checkpoints. Those that keep all sessions in memory are not taken all the way: their last
slope is extrapolated to 10,000, which for ours is too much, as its cache is bounded. `--full`
takes Lockstep's default all the way, which needs about six minutes.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import measure, peers, table
from benchmarks.conversation import WORDS, find_model
from benchmarks.gateway.contestants import CORES, free_port, ready_line, running, wait_for
from benchmarks.gateway.traffic import MODEL
from benchmarks.gateway.traffic import request as http_request
from benchmarks.table import Row

SESSIONS, TURNS = 10_000, 20
AT_ONCE = 8
QUESTION = 130
"""Words of a question: about as many tokens as the completions have."""
STEPS = {
    "lockstep": (500, 1_500, 2_500, 3_000, 3_500),
    "lockstep-memory": (150, 300),
    "rllm": (40, 100),
    "rllm-memory": (40, 100),
}
FULL = (1_000, 2_500, 5_000, 7_500, SESSIONS)
FILES = ("sessions.sqlite*", "traces.sqlite*")
"""Where Lockstep and its peer keep sessions. Lockstep's state of the fleet lies beside them."""
TOKEN = "session-benchmark-token"


@dataclass(frozen=True, slots=True)
class Gateway:
    """One that runs, where it keeps sessions on disk, and how many turns it says it has kept."""

    port: int
    pid: int
    home: Path
    turns_of: Callable[[str], int]


@dataclass(slots=True)
class Growth:
    """Memory and disk, in bytes, by how many sessions were held."""

    memory: dict[int, int] = field(default_factory=dict)
    disk: dict[int, int] = field(default_factory=dict)

    def at(self, sessions: int) -> float:
        """Resident memory after so many sessions."""
        return extrapolated(self.memory, sessions)

    def disk_at(self, sessions: int) -> float:
        return extrapolated(self.disk, sessions)

    @property
    def last(self) -> int:
        """Resident memory at the last checkpoint."""
        return self.memory[max(self.memory)]

    @property
    def slope(self) -> float:
        """Bytes of memory that each of the last sessions added."""
        return slope(self.memory)


def slope(points: dict[int, int]) -> float:
    (before, low), (last, high) = list(points.items())[-2:]
    return (high - low) / (last - before)


def extrapolated(points: dict[int, int], to: int) -> float:
    """The last point and its slope, up to `to`."""
    last = max(points)
    return points[last] + slope(points) * (to - last)


def rows() -> list[Row]:
    return compare(STEPS)


def compare(steps: dict[str, tuple[int, ...]]) -> list[Row]:
    tokenizer = str(find_model())
    with upstream_url(tokenizer) as upstream:
        seen = {name: grown(name, upstream, tokenizer, steps[name]) for name in steps}
    ours, theirs = seen["lockstep"], seen["rllm"]
    peer = peers.VERSIONS["rllm-model-gateway"]
    return [
        Row(
            what="resident memory after 10,000 sessions of 20 turns, sessions in memory",
            against=f"{peer}, --store memory",
            ours=seen["lockstep-memory"].at(SESSIONS) / 1e6,
            theirs=seen["rllm-memory"].at(SESSIONS) / 1e6,
            unit="MB",
            headline="gateway: resident memory after 10,000 sessions of 20 turns, in memory",
            note=f"ours {figures(seen['lockstep-memory'])}; theirs {figures(seen['rllm-memory'])}",
        ),
        Row(
            what="the same by default: sessions in a file",
            against=f"{peer}, sqlite",
            ours=ours.last / 1e6,
            theirs=theirs.last / 1e6,
            unit="MB",
            note=f"both are bounded: ours {figures(ours)}, with its cache full; "
            f"theirs {figures(theirs)}, with neither a tokenizer nor a session in memory",
        ),
        Row(
            what="size of these files",
            against=f"{peer}, sqlite",
            ours=ours.disk_at(SESSIONS) / 1e6,
            theirs=theirs.disk_at(SESSIONS) / 1e6,
            unit="MB",
            note="theirs stores the whole history and prompt with every turn",
        ),
    ]


def figures(growth: Growth) -> str:
    """The figures behind an extrapolated one."""
    return (
        f"{growth.memory[0] / 1e6:.0f} MB at start, {growth.last / 1e6:.0f} MB at "
        f"{max(growth.memory):,} sessions, then "
        f"{growth.slope / 1e3:.3g} kB per session"
    )


@contextmanager
def upstream_url(tokenizer: str) -> Iterator[str]:
    """The URL of the upstream."""
    command = [sys.executable, "-m", "benchmarks.sessions.upstream", tokenizer]
    with running(command, set(CORES), cwd=peers.ROOT, stdout=subprocess.PIPE) as process:
        yield f"http://127.0.0.1:{ready_line(process)['port']}"


def grown(name: str, upstream: str, tokenizer: str, counts: tuple[int, ...]) -> Growth:
    """How one contestant grows. Raises RuntimeError when it has lost a turn."""
    growth = Growth()
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        gateway = stack.enter_context(CONTESTANTS[name](home, upstream, tokenizer))
        # One alone first: the peer opens its file once per request that comes before it is open,
        # and then loses turns.
        asyncio.run(hold(gateway.port, range(-1, 0)))
        held = 0
        for count in (0, *counts):
            asyncio.run(hold(gateway.port, range(held, count)))
            held = count
            growth.memory[count] = measure.rss(gateway.pid)
            files = (file for name in FILES for file in home.rglob(name))
            growth.disk[count] = sum(file.stat().st_size for file in files)
            print(f"{name}: {count:,} sessions, {growth.memory[count] / 1e6:,.0f} MB", flush=True)
        for one in (0, held // 2, held - 1):
            if (kept := gateway.turns_of(f"s{one}")) != TURNS:
                raise RuntimeError(f"{name} has kept {kept} turns of session s{one}, not {TURNS}")
    return growth


async def hold(port: int, sessions: range) -> None:
    """Leads these conversations, a few at a time."""
    waiting = iter(sessions)

    async def some() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
        for session in waiting:
            await lead([(reader, writer)], session)
        writer.close()

    await asyncio.gather(*(some() for _ in range(min(AT_ONCE, len(sessions)))))


async def lead(
    connections: Sequence[tuple[asyncio.StreamReader, asyncio.StreamWriter]], session: int
) -> list[dict[str, str]]:
    """One conversation, its turns on the connections in turn; each sends the whole history."""
    draw = random.Random(session)
    messages: list[dict[str, str]] = []
    for turn in range(TURNS):
        words = " ".join(draw.choices(WORDS, k=QUESTION))
        messages.append({"role": "user", "content": f"{session}.{turn}: {words}"})
        body = json.dumps({"model": MODEL, "messages": messages}).encode()
        reader, writer = connections[turn % len(connections)]
        writer.write(http_request(f"/sessions/s{session}/v1/chat/completions", body))
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
        response = await reader.readexactly(length)
        if b" 200 " not in head.partition(b"\r\n")[0]:
            raise RuntimeError(f"a turn failed: {response[:500]!r}")
        reply = json.loads(response)["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": reply})
    return messages


@contextmanager
def lockstep(home: Path, upstream: str, tokenizer: str, *options: str) -> Iterator[Gateway]:
    command = [
        sys.executable, "-m", "lockstep", "gateway", "--worker", upstream, "--tokenizer", tokenizer,
        "--port", "0", "--admin-port", "0", "--json", "--state-dir", str(home), *options,
    ]  # fmt: skip
    environ = {k: v for k, v in os.environ.items() if not k.startswith("LOCKSTEP_")}
    environ["LOCKSTEP_ADMIN_TOKEN"] = TOKEN
    with running(command, set(CORES), cwd=home, env=environ, stdout=subprocess.PIPE) as process:
        ready = ready_line(process)

        def turns_of(session: str) -> int:
            return kept_by(read(f"{ready['admin_url']}/v1/rl/sessions/{session}", TOKEN))

        yield Gateway(int(ready["url"].rpartition(":")[2]), process.pid, home, turns_of)


def kept_by(session: dict[str, Any]) -> int:
    """The turns of a session that can be trained on: one branch, with logprobs."""
    (sample,) = session["samples"]
    if len(sample["token_ids"]) != len(sample["logprobs"]) or not sum(sample["logprobs"]):
        raise RuntimeError(f"session {session['session']['id']} has lost its logprobs")
    return int(session["session"]["turns"])


@contextmanager
def rllm(home: Path, upstream: str, tokenizer: str, *options: str) -> Iterator[Gateway]:
    """It takes text as it is and has no use for the tokenizer."""
    port = free_port()
    command = [
        str(peers.python("rllm-model-gateway")), "-m", "rllm_model_gateway", "--host", "127.0.0.1",
        "--port", str(port), "--worker", f"{upstream}/v1", "--log-level", "warning",
        "--db-path", str(home / "traces.sqlite"), *options,
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with running(command, set(CORES), cwd=home, stdout=subprocess.DEVNULL) as process:
        wait_for(process, f"{url}/health")

        def turns_of(session: str) -> int:
            return len(read(f"{url}/sessions/{session}/traces"))

        yield Gateway(port, process.pid, home, turns_of)


CONTESTANTS: dict[str, Callable[[Path, str, str], Any]] = {
    "lockstep": lockstep,
    "lockstep-memory": lambda *place: lockstep(*place, "--sessions", "memory"),
    "rllm": rllm,
    "rllm-memory": lambda *place: rllm(*place, "--store", "memory"),
}


def read(url: str, token: str = "") -> Any:
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


if __name__ == "__main__":
    full = "--full" in sys.argv
    if full:
        sys.argv.remove("--full")
    table.main(lambda: compare(STEPS | ({"lockstep": FULL} if full else {})), __doc__)
