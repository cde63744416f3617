"""The registry has a line for every engine: a name without a driver is no name."""

from __future__ import annotations

from typing import get_args

from lockstep.backends.admin import AdminName
from lockstep.backends.detect import OWNERS
from lockstep.backends.registry import ADMINS, BACKENDS, TRANSPORTS
from lockstep.backends.transport import TransportName


def test_every_name_opens_the_driver_of_that_name() -> None:
    assert set(TRANSPORTS) == set(get_args(TransportName))
    assert set(ADMINS) == set(get_args(AdminName)) == set(BACKENDS) - {"auto"}
    for name, driver in [*TRANSPORTS.items(), *ADMINS.items()]:
        assert driver.name == name  # type: ignore[attr-defined]


def test_every_owner_of_model_cards_speaks_a_known_dialect() -> None:
    assert set(OWNERS.values()) <= set(TRANSPORTS)
