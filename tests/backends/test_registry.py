"""The registry has a line for every engine: a name without a driver is no name."""

from __future__ import annotations

import socket
from typing import get_args

import pytest
from starlette.applications import Starlette

import lockstep
from lockstep.backends.admin import AdminName
from lockstep.backends.detect import OWNERS
from lockstep.backends.registry import ADMINS, BACKENDS, TRANSPORTS
from lockstep.backends.transport import TransportName
from lockstep.http.server.server import listen, serving, url_of
from lockstep.tokens.errors import Unavailable


def test_every_name_opens_the_driver_of_that_name() -> None:
    assert set(TRANSPORTS) == set(get_args(TransportName))
    assert set(ADMINS) == set(get_args(AdminName)) == set(BACKENDS) - {"auto"}
    for name, driver in [*TRANSPORTS.items(), *ADMINS.items()]:
        assert driver.name == name  # type: ignore[attr-defined]


def test_every_owner_of_model_cards_speaks_a_known_dialect() -> None:
    assert set(OWNERS.values()) <= set(TRANSPORTS)


async def test_where_nothing_listens_the_way_out_is_to_start_a_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(Unavailable, match=r"no server responds at .*: start one \(`lockstep serve"):
        async with lockstep.connect(url):
            pass


async def test_a_server_that_is_none_of_these_is_told_by_what_was_tried() -> None:
    with listen("127.0.0.1", 0) as sock:
        async with serving([(Starlette(), sock)]):
            with pytest.raises(
                Unavailable, match=r"name it with transport=.*/v1/rl/workers: "
            ) as e:
                async with lockstep.connect(url_of(sock)):
                    pass
    assert "no server responds" not in e.value.message
