"""The session benchmark holds real sessions: what it measures is kept, every turn of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from benchmarks.sessions import bench as sessions


@pytest.fixture(scope="module")
def upstream() -> Iterator[str]:
    with sessions.upstream_url("tiny") as url:
        yield url


@pytest.mark.parametrize("name", ["lockstep", "lockstep-memory"])
def test_every_turn_of_every_session_is_kept(name: str, upstream: str) -> None:
    growth = sessions.grown(name, upstream, "tiny", (2, 4))
    assert list(growth.memory) == [0, 2, 4]
    assert min(growth.memory.values()) > 0
    on_disk = growth.disk[4] > 0
    assert on_disk == (name == "lockstep")


def test_a_gateway_that_loses_a_turn_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, upstream: str
) -> None:
    monkeypatch.setattr(sessions, "kept_by", lambda session: int(session["session"]["turns"]) - 1)
    with pytest.raises(RuntimeError, match="has kept 19 turns of session s0, not 20"):
        sessions.grown("lockstep", upstream, "tiny", (1,))


def test_the_last_slope_is_extrapolated() -> None:
    assert sessions.extrapolated({0: 10, 100: 500, 200: 600}, 1_000) == 600 + 800
