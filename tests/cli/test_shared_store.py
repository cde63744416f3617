"""The options of a store: which URLs and options fit `--store`, and the limits of its sessions."""

from __future__ import annotations

import pytest

from lockstep.cli.serving.arguments import GatewayArguments
from lockstep.cli.serving.shared_store import advertised, check_shared
from lockstep.settings import Settings
from lockstep.tokens.errors import BadRequest

SETTINGS = Settings(admin_token="token")
URL = "postgresql://lockstep@127.0.0.1/x"


@pytest.mark.parametrize(("url", "options", "settings", "message"), [
    ("sqlite:/tmp/x", {}, SETTINGS, r"gateways share \(postgresql, postgres\): give --state-dir"),
    ("memory:", {}, SETTINGS, "give --state-dir"),
    ("mysql://u:secret@h/y", {}, SETTINGS, "the store is no URL of memory, sqlite, postgresql"),
    (URL, {"sessions": "memory"}, SETTINGS, "--sessions memory and a store"),
    (URL, {"state_dir": "/tmp/x"}, SETTINGS, "--state-dir /tmp/x and a store"),
    (URL, {}, Settings(), "need one admin token: set LOCKSTEP_ADMIN_TOKEN"),
])  # fmt: skip
def test_a_store_that_cannot_be_shared_is_refused_before_it_is_opened(
    url: str, options: dict[str, str], settings: Settings, message: str
) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        check_shared(url, GatewayArguments(**options), settings)
    assert "secret" not in caught.value.message


def test_a_gateway_that_listens_everywhere_must_say_where_others_reach_it() -> None:
    with pytest.raises(BadRequest, match="give --advertise"):
        advertised(GatewayArguments(), "http://0.0.0.0:8001")
    named = GatewayArguments(advertise="http://10.0.0.1:8001/")
    assert advertised(named, "http://0.0.0.0:8001") == "http://10.0.0.1:8001"
    assert advertised(GatewayArguments(), "http://127.0.0.1:1") == "http://127.0.0.1:1"


def test_limits_of_sessions_are_set_as_those_of_requests() -> None:
    arguments = GatewayArguments(limit=("sessions=5", "session_cache_bytes=7", "messages=3"))
    options = arguments.options(SETTINGS)
    limits = options.session_limits
    assert (limits.sessions, limits.session_cache_bytes, limits.session_turns) == (5, 7, 1000)
    assert options.limits.messages == 3
