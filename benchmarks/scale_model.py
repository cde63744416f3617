"""A model of capacity: what a fleet of gateways on PostgreSQL needs, and where it bends first.

    python -m benchmarks.scale_model [--workers N] [--gateways N] [--sessions-per-minute N] ...

Arithmetic on unit costs that `scale_costs` measures; nothing is run. A share above 1 means that a
part is asked for more than it has.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields

PROBES_PER_SECOND = 100.0
"""Most looks at workers by one gateway, as `HealthMonitor` has it."""
CONNECTIONS = 11
"""Of one gateway to PostgreSQL: a pool of 10, and one that listens."""
COUNT_SECONDS = 10.0
"""Between two counts of all sessions, which one gateway makes for all."""
CALLS_PER_UPDATE = 8
"""Calls to each worker in a weight transaction: stage, prove, pause, commit, resume and looks."""


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """CPU in microseconds or cores, and bytes. The names of costs are those of their part."""

    gateway_turn_us: float
    postgres_turn_us: float
    statements_per_turn: float
    wal_bytes_per_turn: float
    stored_bytes_per_turn: float
    gateway_idle_cores: float
    postgres_idle_cores_per_gateway: float
    idle_statements_per_gateway: float
    notify_listener_us: float
    counted_session_us: float
    probe_gateway_us: float
    probe_worker_us: float


MEASURED = UnitCosts(
    gateway_turn_us=1780.0,
    postgres_turn_us=527.0,
    statements_per_turn=2.05,
    wal_bytes_per_turn=4660.0,
    stored_bytes_per_turn=4560.0,
    gateway_idle_cores=0.0058,
    postgres_idle_cores_per_gateway=0.0016,
    idle_statements_per_gateway=8.5,
    notify_listener_us=17.0,
    counted_session_us=0.081,
    probe_gateway_us=124.0,
    probe_worker_us=178.0,
)
"""By `scale_costs`, on a busy virtual machine with two cores of an Intel server, PostgreSQL 15:
turns of 160 tokens, with up to 20 before them."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """What is asked for, and what there is."""

    workers: int = 1000
    gateways: int = 100
    sessions_per_minute: float = 100_000.0
    turns_per_session: float = 20.0
    kept_hours: float = 1.0
    updates_per_hour: float = 60.0
    checkpoint_gb: float = 16.0
    gateway_cores: float = 1.0
    postgres_cores: float = 32.0
    postgres_connections: int = 1200
    postgres_wal_mb: float = 500.0
    postgres_disk_tb: float = 10.0
    storage_gb_per_second: float = 100.0

    @property
    def turns_per_second(self) -> float:
        return self.sessions_per_minute * self.turns_per_session / 60

    @property
    def kept_sessions(self) -> float:
        return self.sessions_per_minute * 60 * self.kept_hours


@dataclass(frozen=True, slots=True)
class Share:
    """How much of a part is used, and what to do when it is too much."""

    part: str
    needed: float
    available: float
    unit: str
    way_out: str

    @property
    def used(self) -> float:
        return self.needed / self.available


def shares(fleet: Fleet, costs: UnitCosts) -> list[Share]:
    """Every part with what it is asked for, the most used first: that one bends first."""
    probes = min(PROBES_PER_SECOND, fleet.workers)
    turn_cores = fleet.turns_per_second * costs.postgres_turn_us / 1e6
    counting = fleet.kept_sessions * costs.counted_session_us / 1e6 / COUNT_SECONDS
    notifying = fleet.updates_per_hour / 3600 * 10 * fleet.gateways * costs.notify_listener_us / 1e6
    idle = fleet.gateways * costs.postgres_idle_cores_per_gateway
    calls = fleet.workers * CALLS_PER_UPDATE * fleet.updates_per_hour / 3600
    gateway = (
        fleet.turns_per_second / fleet.gateways * costs.gateway_turn_us / 1e6
        + probes * costs.probe_gateway_us / 1e6
        + costs.gateway_idle_cores
    )
    stored = fleet.kept_sessions * fleet.turns_per_session * costs.stored_bytes_per_turn
    parts = [
        Share("gateway: turns, probes, its own upkeep", gateway, fleet.gateway_cores, "cores each",
              "more gateways, or --gateways N on a machine of many cores"),
        Share("leader: calls of updates, beside its turns",
              gateway + calls * costs.probe_gateway_us / 1e6, fleet.gateway_cores, "cores",
              "a gateway of its own for control: leave it out of the load balancer"),
        Share("worker: probes of all gateways",
              fleet.gateways * probes / fleet.workers * costs.probe_worker_us / 1e6, 0.05,
              "cores each", "fewer, larger gateways"),
        Share("PostgreSQL: CPU of turns", turn_cores, fleet.postgres_cores, "cores",
              "shard: one database for each group of sessions"),
        Share("PostgreSQL: CPU in all", turn_cores + counting + notifying + idle,
              fleet.postgres_cores, "cores", "see its parts below"),
        Share("PostgreSQL: CPU of counting sessions", counting, fleet.postgres_cores, "cores",
              "delete sessions once they are read (DELETE, or fewer --session-hours)"),
        Share("PostgreSQL: CPU of notifications and leases", notifying + idle,
              fleet.postgres_cores, "cores", "fewer gateways"),
        Share("PostgreSQL: connections", fleet.gateways * CONNECTIONS, fleet.postgres_connections,
              "connections", "raise max_connections, or fewer gateways"),
        Share("PostgreSQL: write-ahead log",
              fleet.turns_per_second * costs.wal_bytes_per_turn / 1e6,
              fleet.postgres_wal_mb, "MB/s", "shard, or a faster disk"),
        Share("PostgreSQL: disk for kept sessions", stored / 1e12, fleet.postgres_disk_tb, "TB",
              "delete sessions once they are read"),
        Share("storage: every worker reads a checkpoint",
              fleet.workers * fleet.checkpoint_gb * fleet.updates_per_hour / 3600,
              fleet.storage_gb_per_second, "GB/s",
              "a copy on each node (RayFleet's weights_dir), adapters, or fewer updates"),
    ]  # fmt: skip
    return sorted(parts, key=lambda each: each.used, reverse=True)


def most_sessions(fleet: Fleet, costs: UnitCosts, part: str) -> float:
    """Sessions a minute at which that part alone is full; 0 when it is full without any.

    Raises ValueError for a part that there is not.
    """

    def used(rate: float) -> float:
        named = {
            each.part: each.used for each in shares(_with(fleet, sessions_per_minute=rate), costs)
        }
        if part not in named:
            raise ValueError(f"part is {part!r}: expected one of {', '.join(named)}")
        return named[part]

    fixed, slope = used(0.0), used(1.0) - used(0.0)
    if fixed >= 1:
        return 0.0
    return float("inf") if slope <= 0 else (1 - fixed) / slope


def _with(fleet: Fleet, **changes: float) -> Fleet:
    values = {each.name: getattr(fleet, each.name) for each in fields(fleet)}
    return Fleet(**{**values, **changes})


def table(fleet: Fleet, costs: UnitCosts) -> str:
    """The shares as a table in Markdown."""
    lines = ["| part | needs | has | used | full at (sessions a minute) | then |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for each in shares(fleet, costs):
        limit = most_sessions(fleet, costs, each.part)
        full = "does not depend" if limit == float("inf") else f"{limit:,.0f}"
        lines.append(f"| {each.part} | {each.needed:,.3g} {each.unit} | {each.available:,g} | "
                     f"{each.used:.0%} | {full} | {each.way_out} |")  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for each in fields(Fleet):
        kind = int if isinstance(each.default, int) else float
        parser.add_argument(f"--{each.name.replace('_', '-')}", type=kind, default=each.default)
    print(table(Fleet(**vars(parser.parse_args())), MEASURED))


if __name__ == "__main__":
    main()
