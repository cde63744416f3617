"""One gateway with one worker, attacked by every test of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.abuse.target import NAMES, Listener, Target, running_target


@pytest.fixture(scope="session")
def target() -> Iterator[Target]:
    with running_target() as running:
        yield running


@pytest.fixture(params=NAMES)
def listener(request: pytest.FixtureRequest, target: Target) -> Listener:
    return target.listeners[request.param]
