"""Limits are options, by their name."""

from __future__ import annotations

import pytest

from lockstep.http.server.limits import LIMITS, parse_limits
from lockstep.protocol.json.strict import LIMITS as REQUEST_LIMITS
from lockstep.tokens.errors import BadRequest


def test_limits_of_requests_and_of_connections_are_set_alike() -> None:
    options = ["messages=5", "progress_seconds=1.5", "connections=7"]
    request, server = parse_limits(options, REQUEST_LIMITS, LIMITS)
    assert (request.messages, server.progress_seconds, server.connections) == (5, 1.5, 7)
    assert parse_limits((), REQUEST_LIMITS, LIMITS) == (REQUEST_LIMITS, LIMITS)


@pytest.mark.parametrize("option", [
    "", "messages", "messages=", "messages=-1", "messages=0", "messages=1.5", "nothing=1",
    "progress_seconds=nan", "progress_seconds=inf", "messages=" + "9" * 5000,
])  # fmt: skip
def test_a_limit_that_is_none_is_refused_with_the_names(option: str) -> None:
    with pytest.raises(BadRequest, match="NAME=NUMBER, with one of body_bytes"):
        parse_limits([option], REQUEST_LIMITS, LIMITS)
