"""The model of capacity computes what it says, from costs that are easy to follow."""

from __future__ import annotations

import pytest
from benchmarks.scale_model import MEASURED, Fleet, Share, UnitCosts, most_sessions, shares, table

COSTS = UnitCosts(
    gateway_turn_us=1000.0, postgres_turn_us=500.0, statements_per_turn=2.0,
    wal_bytes_per_turn=5000.0, stored_bytes_per_turn=4000.0, gateway_idle_cores=0.01,
    postgres_idle_cores_per_gateway=0.002, idle_statements_per_gateway=10.0,
    notify_listener_us=10.0, counted_session_us=0.1, probe_gateway_us=100.0,
    probe_worker_us=200.0,
)  # fmt: skip
FLEET = Fleet(workers=1000, gateways=100, sessions_per_minute=6000.0, turns_per_session=10.0,
              kept_hours=1.0, updates_per_hour=36.0, checkpoint_gb=10.0, postgres_cores=10.0,
              postgres_connections=2200, storage_gb_per_second=50.0)  # fmt: skip


def named(fleet: Fleet, costs: UnitCosts = COSTS) -> dict[str, Share]:
    return {each.part: each for each in shares(fleet, costs)}


@pytest.mark.parametrize(
    ("part", "needed"),
    [
        # 1,000 turns a second over 100 gateways, 100 probes a second each, and its upkeep
        ("gateway: turns, probes, its own upkeep", 10 * 1e-3 + 100 * 1e-4 + 0.01),
        # and 1,000 workers x 8 calls, 36 times an hour
        ("leader: calls of updates, beside its turns", 0.03 + 1000 * 8 * 0.01 * 1e-4),
        # 100 gateways look at each of 1,000 workers every 10 s
        ("worker: probes of all gateways", 10 * 2e-4),
        ("PostgreSQL: CPU of turns", 0.5),
        # one gateway counts 360,000 sessions every 10 s
        ("PostgreSQL: CPU of counting sessions", 0.1 * 360_000 * 0.1e-6),
        # 10 notifications for each of 36 updates an hour, to 100 gateways
        ("PostgreSQL: CPU of notifications and leases", 0.01 * 10 * 100 * 1e-5 + 0.2),
        ("PostgreSQL: CPU in all", 0.5 + 0.0036 + 0.2001),
        ("PostgreSQL: connections", 1100),
        ("PostgreSQL: write-ahead log", 5.0),
        ("PostgreSQL: disk for kept sessions", 360_000 * 10 * 4000 / 1e12),
        ("storage: every worker reads a checkpoint", 1000 * 10 * 0.01),
    ],
)
def test_a_part_needs_what_its_units_cost(part: str, needed: float) -> None:
    assert named(FLEET)[part].needed == pytest.approx(needed)


def test_the_most_used_part_comes_first() -> None:
    parts = shares(FLEET, COSTS)
    assert parts[0].part == "storage: every worker reads a checkpoint"
    assert parts[0].used == pytest.approx(2.0)
    assert [each.used for each in parts] == sorted((each.used for each in parts), reverse=True)


def test_a_small_fleet_is_looked_at_once_a_second() -> None:
    few = Fleet(workers=10, gateways=1, sessions_per_minute=0.0, updates_per_hour=0.0)
    gateway = named(few)["gateway: turns, probes, its own upkeep"]
    assert gateway.needed == pytest.approx(10 * 1e-4 + 0.01)


def test_the_rate_at_which_a_part_is_full_fills_it() -> None:
    for part in ("PostgreSQL: CPU of turns", "gateway: turns, probes, its own upkeep"):
        rate = most_sessions(FLEET, COSTS, part)
        full = Fleet(**{**{n: getattr(FLEET, n) for n in Fleet.__slots__},
                        "sessions_per_minute": rate})  # fmt: skip
        assert named(full)[part].used == pytest.approx(1.0)
    assert most_sessions(FLEET, COSTS, "PostgreSQL: connections") == float("inf")
    assert most_sessions(FLEET, COSTS, "storage: every worker reads a checkpoint") == 0.0
    with pytest.raises(ValueError, match="expected one of"):
        most_sessions(FLEET, COSTS, "moon")


def test_measured_costs_are_all_there() -> None:
    assert all(getattr(MEASURED, name) > 0 for name in UnitCosts.__slots__)
    assert table(Fleet(), MEASURED).count("\n") == 12
