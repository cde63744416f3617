"""CPU time of a turn over PostgreSQL beside SQLite, and of two gateways beside one.

Real gateways before one upstream that responds at once, the same conversations for each, in turns.
CPU time of the gateways is measured, not the clock: clients, upstream and PostgreSQL share the
cores here. Gateways with cores of their own do as many turns a second as their CPU time allows.
The CPU time of an idle gateway is subtracted: on a busy machine a round takes long.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

from tests.scale.postgres_server import postgres_server

from benchmarks import measure, table
from benchmarks.conversation import find_model
from benchmarks.gateway.contestants import CORES, ready_line, running
from benchmarks.sessions.bench import TOKEN, TURNS, hold, lead, lockstep, upstream_url
from benchmarks.table import Row

SESSIONS = 24
"""Conversations of a round."""
ROUNDS = 5
GATEWAYS = 2
IDLE_SECONDS = 3.0


def rows() -> list[Row]:
    tokenizer = str(find_model())
    names = count()
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        upstream = stack.enter_context(upstream_url(tokenizer))
        database = stack.enter_context(postgres_server())
        url = f"{database.url}?schema=one"
        file = stack.enter_context(lockstep(home, upstream, tokenizer))
        one = [stack.enter_context(on_store(url, upstream, tokenizer))]
        pair_url = f"{database.url}?schema=pair"
        pair = [
            stack.enter_context(on_store(pair_url, upstream, tokenizer)) for _ in range(GATEWAYS)
        ]
        apart = [
            stack.enter_context(on_store(f"{database.url}?schema=apart{at}", upstream, tokenizer))
            for at in range(GATEWAYS)
        ]

        def each(
            gateways: Sequence[tuple[int, int]], *, wander: bool = False
        ) -> Callable[[], float]:
            """Microseconds of CPU that the gateways take for a turn."""

            def spent() -> float:
                return sum(measure.cpu_seconds(pid) for _, pid in gateways)

            before = spent()
            time.sleep(IDLE_SECONDS)
            idle = (spent() - before) / IDLE_SECONDS

            def measured() -> float:
                first = next(names) * SESSIONS
                before, begun = spent(), time.monotonic()
                asyncio.run(_held([port for port, _ in gateways], first, wander))
                own = spent() - before - idle * (time.monotonic() - begun)
                return own / (SESSIONS * TURNS) * 1e6

            return measured

        seen = measure.in_turns(
            {
                "sqlite": each([(file.port, file.pid)]),
                "one": each(one),
                "two": each(pair),
                "apart": each(apart),
                "wandering": each(pair, wander=True),
            },
            ROUNDS,
        )
    return [
        Row(
            what="CPU of a gateway for a session turn, sessions in PostgreSQL",
            against="lockstep, sessions in SQLite",
            ours=seen["one"],
            theirs=seen["sqlite"],
            unit="µs",
            note="two statements a turn; turns of 160 tokens, up to 20 before them",
        ),
        Row(
            what="session turns that the CPU time of two gateways on one PostgreSQL allows",
            against="one gateway on one core",
            ours=GATEWAYS / seen["two"] * 1e6,
            theirs=1 / seen["one"] * 1e6,
            unit="turns/s",
            at_least=1.7,
            headline="two gateways on one PostgreSQL: session turns their CPU time allows",
            note="idle CPU subtracted; each conversation stays at one gateway",
        ),
        Row(
            what="the same",
            against="two gateways that share nothing",
            ours=GATEWAYS / seen["two"] * 1e6,
            theirs=GATEWAYS / seen["apart"] * 1e6,
            unit="turns/s",
            note="both pairs run at once, so that both slow each other down",
        ),
        Row(
            what="the same, with consecutive turns at different gateways",
            against="one gateway on one core",
            ours=GATEWAYS / seen["wandering"] * 1e6,
            theirs=1 / seen["one"] * 1e6,
            unit="turns/s",
            note="each turn reads the other gateway's turn from the store",
        ),
    ]


async def _held(ports: list[int], first: int, wander: bool) -> None:
    """Leads the conversations from number `first` on, at one port each or at all in turn."""
    if not wander:
        share = SESSIONS // len(ports)
        ranges = [range(first + at * share, first + (at + 1) * share) for at in range(len(ports))]
        await asyncio.gather(*(hold(port, each) for port, each in zip(ports, ranges, strict=True)))
        return
    waiting = iter(range(first, first + SESSIONS))

    async def some() -> None:
        connections = [
            await asyncio.open_connection("127.0.0.1", port, limit=1 << 24) for port in ports
        ]
        for session in waiting:
            await lead(connections, session)
        for _, writer in connections:
            writer.close()

    await asyncio.gather(*(some() for _ in range(8)))


@contextmanager
def on_store(url: str, upstream: str, tokenizer: str) -> Iterator[tuple[int, int]]:
    """Port and process of a gateway whose sessions are in the store."""
    command = [
        sys.executable, "-m", "lockstep", "gateway", "--worker", upstream, "--tokenizer", tokenizer,
        "--port", "0", "--admin-port", "0", "--json",
    ]  # fmt: skip
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("LOCKSTEP_", "PG"))}
    environ |= {"LOCKSTEP_ADMIN_TOKEN": TOKEN, "LOCKSTEP_STORE": url}
    with running(command, set(CORES), env=environ, stdout=subprocess.PIPE) as process:
        yield int(ready_line(process)["url"].rpartition(":")[2]), process.pid


if __name__ == "__main__":
    table.main(rows, __doc__)
