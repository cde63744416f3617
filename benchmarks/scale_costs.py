"""Measures what one unit of work costs with gateways on PostgreSQL: the input of `scale_model`.

    python -m benchmarks.scale_costs

Real gateways, a real PostgreSQL and a real worker on this machine. CPU time is measured, not the
clock, and what the parts take while nobody asks is taken off.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import asyncpg
from tests.processes import WorkerProcess
from tests.scale.postgres_server import PostgresServer, postgres_server

from benchmarks import measure
from benchmarks.conversation import find_model
from benchmarks.scale import on_store
from benchmarks.scale_model import MEASURED, UnitCosts
from benchmarks.sessions.bench import TURNS, hold, upstream_url
from lockstep.http.client.client import HttpClient

SESSIONS = 24
IDLE_SECONDS = 20.0
REPORT_SECONDS = 11.0
"""After which idle backends of PostgreSQL have reported what they did."""
LISTENERS, NOTIFICATIONS = 20, 200
ROWS = 200_000
PROBES = 500
TABLE_BYTES = """
SELECT sum(pg_total_relation_size(c.oid))::bigint
FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace
WHERE nspname = 'costs' AND relkind = 'r'
"""


def main() -> None:
    tokenizer = str(find_model())
    costs = MEASURED
    with ExitStack() as stack:
        upstream = stack.enter_context(upstream_url(tokenizer))
        database = stack.enter_context(postgres_server())
        url = f"{database.url}?schema=costs"
        port, pid = stack.enter_context(on_store(url, upstream, tokenizer))
        costs = asyncio.run(of_a_turn(costs, database, port, pid))
        costs = asyncio.run(of_the_server(costs, database))
        worker = WorkerProcess()
        stack.callback(worker.stop)
        costs = asyncio.run(of_a_probe(costs, worker))
    print(json.dumps(asdict(costs), indent=1))


def server_cpu(database: PostgresServer) -> float:
    """CPU seconds of PostgreSQL with all its processes."""
    pid = int((database.directory / "data/postmaster.pid").read_text().split()[0])
    return sum(
        measure.cpu_seconds(each) for each in measure.tree(pid) if Path(f"/proc/{each}").exists()
    )


async def counters(connection: asyncpg.Connection) -> tuple[int, int, int]:
    """Transactions, bytes of write-ahead log and bytes of tables so far."""
    await connection.execute("SELECT pg_stat_clear_snapshot()")
    return (
        await connection.fetchval("SELECT sum(xact_commit)::bigint FROM pg_stat_database"),
        await connection.fetchval("SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint"),
        await connection.fetchval(TABLE_BYTES),
    )  # fmt: skip


async def of_a_turn(costs: UnitCosts, database: PostgresServer, port: int, pid: int) -> UnitCosts:
    """Costs of an idle gateway, and of a turn beyond those."""
    connection = await asyncpg.connect(database.url)
    await hold(port, range(4))
    await asyncio.sleep(REPORT_SECONDS)
    begun, first = time.monotonic(), await counters(connection)
    own, server = measure.cpu_seconds(pid), server_cpu(database)
    await asyncio.sleep(IDLE_SECONDS)
    seconds, last = time.monotonic() - begun, await counters(connection)
    idle_own = (measure.cpu_seconds(pid) - own) / seconds
    idle_server = (server_cpu(database) - server) / seconds
    idle_statements = (last[0] - first[0]) / seconds
    begun, first = time.monotonic(), await counters(connection)
    own, server = measure.cpu_seconds(pid), server_cpu(database)
    await hold(port, range(100, 100 + SESSIONS))
    used, seconds = measure.cpu_seconds(pid) - own, time.monotonic() - begun
    at_server = server_cpu(database) - server
    await asyncio.sleep(REPORT_SECONDS)
    last, waited = await counters(connection), time.monotonic() - begun
    await connection.close()
    turns = SESSIONS * TURNS
    return replace(
        costs,
        gateway_turn_us=(used - idle_own * seconds) / turns * 1e6,
        postgres_turn_us=(at_server - idle_server * seconds) / turns * 1e6,
        statements_per_turn=(last[0] - first[0] - idle_statements * waited) / turns,
        wal_bytes_per_turn=(last[1] - first[1]) / turns,
        stored_bytes_per_turn=(last[2] - first[2]) / turns,
        gateway_idle_cores=idle_own,
        postgres_idle_cores_per_gateway=idle_server,
        idle_statements_per_gateway=idle_statements,
    )


async def of_the_server(costs: UnitCosts, database: PostgresServer) -> UnitCosts:
    """Costs of a notification for each listener, and of a session that is counted."""
    listeners = [await asyncpg.connect(database.url) for _ in range(LISTENERS)]
    for each in listeners:
        await each.add_listener("costs", lambda *_: None)
    speaker = await asyncpg.connect(database.url)
    before = server_cpu(database)
    for _ in range(NOTIFICATIONS):
        await speaker.execute("SELECT pg_notify('costs', '')")
    await asyncio.sleep(0.5)
    notified = server_cpu(database) - before
    for each in listeners:
        await each.close()
    await speaker.execute("SET search_path TO costs")
    await speaker.execute(
        "INSERT INTO sessions (name, tokenizer, created, used, active, turns, bytes)"
        f" SELECT 'row-' || n, '\\x00', 0, 0, 0, 1, 1000 FROM generate_series(1, {ROWS}) AS n"
    )
    await speaker.execute("ANALYZE sessions")
    seconds = []
    for _ in range(5):
        begun = server_cpu(database)
        await speaker.fetch("SELECT count(*), sum(bytes) FROM sessions")
        seconds.append(server_cpu(database) - begun)
    await speaker.close()
    return replace(
        costs,
        notify_listener_us=notified / NOTIFICATIONS / LISTENERS * 1e6,
        counted_session_us=sorted(seconds)[2] / ROWS * 1e6,
    )


async def of_a_probe(costs: UnitCosts, worker: WorkerProcess) -> UnitCosts:
    """Costs of one look at a worker's health, at both ends."""
    client = HttpClient(worker.url, retries=0)
    await client.get("/health")
    own, other = time.process_time(), measure.cpu_seconds(worker.process.pid)
    for _ in range(PROBES):
        await client.get("/health")
    used, there = time.process_time() - own, measure.cpu_seconds(worker.process.pid) - other
    await client.close()
    return replace(
        costs, probe_gateway_us=used / PROBES * 1e6, probe_worker_us=there / PROBES * 1e6
    )


if __name__ == "__main__":
    main()
