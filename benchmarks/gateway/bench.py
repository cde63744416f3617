"""CPU time that a gateway spends on a request: Lockstep beside the alternatives.

    python -m benchmarks.gateway.bench [--only lockstep,vllm-router] [--case 2k] [--hold]

Every gateway has a core to itself, in front of an upstream that responds at once; 32 requests are
in flight at any time, and every response is checked. The gateways take turns; a figure is the
median of five rounds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import measure, peers, table
from benchmarks.conversation import find_model
from benchmarks.gateway.contestants import (
    CONTESTANTS,
    OTHER_CORES,
    Place,
    Server,
    ready_line,
    running,
    start,
)
from benchmarks.gateway.script import make
from benchmarks.gateway.traffic import CASES, Case
from benchmarks.table import Row
from lockstep.models import bundled
from lockstep.render import Renderer

ROUNDS, SECONDS = 5, 0.7
SETTLE = 0.05
"""Seconds for what a gateway still does after its last response."""


class Failed(Exception):
    """A round in which a response was not right."""


@dataclass(frozen=True, slots=True)
class RoundResult:
    """One round: responses that came, those that were decoded and compared, their CPU time."""

    requests: int
    checked: int
    cpu_seconds: float


class Bench:
    """The contestants by name, the upstream and the load generator, all running."""

    def __init__(self, servers: Mapping[str, Server], load: subprocess.Popen[str]) -> None:
        self.servers = servers
        self._load = load

    def round(self, name: str, case: str, seconds: float = SECONDS) -> RoundResult:
        """Connects, then counts while requests are made. Raises Failed."""
        server, way = self.servers[name], CONTESTANTS[name]
        fields: dict[str, object] = {"port": server.port, "case": case, "sessions": way.sessions}
        fields |= {"dialect": "chat" if CASES[case].turns else way.ids, "seconds": seconds}
        self._call("open", name, fields)
        time.sleep(SETTLE)
        before = server.cpu_seconds()
        result = self._call("go", name, fields)
        time.sleep(SETTLE)
        spent = server.cpu_seconds() - before
        if not result["checked"]:
            raise Failed(f"{name}, {fields}: no response was compared")
        return RoundResult(int(result["requests"]), int(result["checked"]), spent)

    def costs(self, case: str, rounds: int) -> dict[str, float]:
        """The median of each contestant that takes part, in milliseconds per request."""

        def cost_of(name: str) -> Callable[[], float]:
            def cost() -> float:
                result = self.round(name, case)
                return 1e3 * result.cpu_seconds / result.requests

            return cost

        taking_part = [name for name in self.servers if takes_part(name, CASES[case])]
        return measure.in_turns({name: cost_of(name) for name in taking_part}, rounds)

    def _call(self, call: str, name: str, fields: dict[str, object]) -> dict[str, float]:
        if self._load.stdin is None or self._load.stdout is None:
            raise Failed("the load generator has no pipes")
        self._load.stdin.write(json.dumps({"call": call, **fields}) + "\n")
        self._load.stdin.flush()
        line = self._load.stdout.readline()
        reply: dict[str, float] = json.loads(line or '{"error": "it ended"}')
        if "error" in reply:
            raise Failed(f"{name}, {fields}: {reply['error']}")
        return reply


def takes_part(name: str, case: Case) -> bool:
    """Whether the contestant does the work of this case.

    A session turn is not vllm-router's work: it copies the text of a chat. Dynamo's generate route
    neither streams nor has chat. The store of rllm-model-gateway only matters in sessions.
    """
    if name == "vllm-router":
        return not case.turns
    if name == "dynamo-generate":
        return not case.stream and not case.turns
    return name != "rllm-memory" or case.turns > 0


@contextmanager
def bench(
    names: Sequence[str], cases: Sequence[str], model: Path | str | None = None
) -> Iterator[Bench]:
    """Starts everything, and ends it with the block. `model` has the tokenizer, by default a real
    one."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-bench-")))
        chosen = model or find_model()
        tokenizer = chosen if isinstance(chosen, Path) else bundled(chosen) or Path(chosen)
        traffic = directory / "traffic.msgpack"
        make(Renderer.load(tokenizer), {name: CASES[name] for name in cases}).write(traffic)

        def beside(module: str, **pipes: int) -> subprocess.Popen[str]:
            command = [sys.executable, "-m", f"benchmarks.gateway.{module}", str(traffic)]
            return stack.enter_context(running(command, OTHER_CORES, cwd=peers.ROOT, **pipes))

        upstream = beside("upstream", stdout=subprocess.PIPE)
        load = beside("load", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        place = Place(stack, directory, tokenizer, traffic, ready_line(upstream))
        yield Bench(start(place, names), load)


TARGETS = {
    ("2k", "lockstep-worker", "vllm-router"): 1.0,
    ("2k", "lockstep", "vllm-router"): 1.15,
    ("stream", "lockstep-worker", "vllm-router"): 0.7,
    ("stream", "lockstep", "vllm-router"): 1.1,
    ("2k-sessions", "lockstep", "dynamo"): 0.7,
    ("2k-sessions", "lockstep", "rllm"): 1 / 5,
}
"""The largest ratio of CPU time to reach, by case, Lockstep's upstream and alternative. These rows
also open the page."""
BEHIND = {"lockstep": "plain vLLM behind", "lockstep-worker": "Lockstep worker behind"}


def rows_of(name: str, costs: Mapping[str, float]) -> list[Row]:
    """Lockstep beside each alternative that was measured with it."""
    case = CASES[name]
    sessions = case.turns > 0
    out = f"{case.out} out" + (" streamed" if case.stream else "")
    what = f"{case.prompt:,} tokens in, {out}, " + ("a session turn" if sessions else "ids")
    completions = "" if sessions else "its /v1/completions, as it has no generate route; "
    frontend = "frontend only" + ("" if sessions else "; ids in nvext.token_data")
    pairs: list[tuple[str, str, str, str]] = [
        ("lockstep-worker", "vllm-router", "vllm-router", ""),
        ("lockstep", "vllm-router", "vllm-router", ""),
        ("lockstep", "dynamo", "dynamo", frontend),
        ("lockstep", "dynamo-generate", "dynamo", "its generate route, off by default"),
        ("lockstep", "rllm", "rllm-model-gateway", completions + "traces in SQLite, its default"),
        ("lockstep", "rllm-memory", "rllm-model-gateway", "traces in memory"),
    ]
    return [
        Row(
            what=f"{what}, {BEHIND[ours]}",
            against=peers.VERSIONS[peer],
            ours=costs[ours],
            theirs=costs[entry],
            unit="ms CPU",
            at_most=TARGETS.get((name, ours, entry)),
            note=note,
            headline=f"gateway: {what}, {BEHIND[ours]}" if (name, ours, entry) in TARGETS else "",
        )
        for ours, entry, peer, note in pairs
        if ours in costs and entry in costs
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument(
        "--only", default=",".join(CONTESTANTS), help=f"of {', '.join(CONTESTANTS)}"
    )
    parser.add_argument("--case", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--hold", action="store_true", help="tell process ids and wait for Enter")
    options = parser.parse_args()
    names, cases = options.only.split(","), options.case.split(",")
    rows: list[Row] = []
    with bench(names, cases) as started:
        for name, server in started.servers.items():
            if options.hold:
                print(f"{name}: process {server.pid}, port {server.port}")
        if options.hold:
            input("Enter to begin ")
        for case in cases:
            costs = started.costs(case, options.rounds)
            costs_line = ", ".join(f"{name} {table.figure(cost)}" for name, cost in costs.items())
            print(f"{case}: {costs_line} ms CPU", flush=True)
            rows += rows_of(case, costs)
    print(table.plain(rows))
    if options.json:
        table.write(rows, options.json)


if __name__ == "__main__":
    main()
