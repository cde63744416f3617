"""The registry: every engine of the list has drivers, and every place that needs one has it."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import get_args

import pytest
from starlette.applications import Starlette

import lockstep
from lockstep.backends.detect import OWNERS
from lockstep.backends.registry import (
    ADMINS,
    BACKENDS,
    ENGINES,
    LAUNCHED,
    TRANSPORTS,
    AdminName,
    EngineName,
    TransportName,
    admin_class,
    check_name,
    transport_class,
)
from lockstep.check.dialect import DIALECTS
from lockstep.check.rows.auth import ROUTES
from lockstep.http.server.server import listen, serving, url_of
from lockstep.tokens.errors import BadRequest, Unavailable


def test_every_name_opens_the_driver_of_that_name() -> None:
    for name in TRANSPORTS:
        assert transport_class(name).name == name
    for name in ADMINS:
        assert admin_class(name).name == name


def test_types_and_choices_are_derived_from_the_list() -> None:
    assert get_args(TransportName) == TRANSPORTS
    assert get_args(AdminName) == ADMINS == BACKENDS[1:]
    assert get_args(EngineName) == LAUNCHED
    assert {engine.transport for engine in ENGINES.values()} <= set(TRANSPORTS)
    assert set(OWNERS.values()) <= set(TRANSPORTS)


def test_the_conformance_kit_knows_every_engine() -> None:
    assert set(DIALECTS) == set(TRANSPORTS)
    assert set(ROUTES) == set(ADMINS)


def test_an_unknown_name_is_rejected_with_the_names_there_are() -> None:
    with pytest.raises(BadRequest, match="engine is 'tgi', expected one of lockstep, vllm"):
        check_name("tgi", LAUNCHED, "engine")


def test_the_list_is_read_without_importing_a_driver() -> None:
    code = (
        "import sys, lockstep.backends.registry; "
        "print([m for m in sys.modules if m.startswith('lockstep.backends.')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "['lockstep.backends.registry']"


async def test_the_error_where_no_server_listens_says_to_start_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(Unavailable, match=r"no server responds at .*: start one \(`lockstep serve"):
        async with lockstep.connect(url):
            pass


async def test_the_error_for_an_unknown_server_lists_what_was_tried() -> None:
    with listen("127.0.0.1", 0) as sock:
        async with serving([(Starlette(), sock)]):
            with pytest.raises(
                Unavailable, match=r"name it with transport=.*/v1/rl/workers: "
            ) as e:
                async with lockstep.connect(url_of(sock)):
                    pass
    assert "no server responds" not in e.value.message
