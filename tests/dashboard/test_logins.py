"""Cookies and codes: signed, for a time, and of no use after a logout."""

from __future__ import annotations

import time

import pytest

from lockstep.dashboard.logins import CODE_SECONDS, COOKIE_SECONDS, MOST_CODES, Logins
from lockstep.tokens.errors import Unauthorized


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def test_a_cookie_is_good_until_it_ends() -> None:
    clock = Clock()
    logins = Logins("token", clock)
    cookie = logins.begin(token="token")
    assert logins.is_valid(cookie)
    clock.now += COOKIE_SECONDS + 1
    assert not logins.is_valid(cookie)


def test_the_date_does_not_move_the_end_of_a_cookie() -> None:
    _, until, _ = Logins("token").begin(token="token").split(".")
    assert 0 <= int(until) - COOKIE_SECONDS <= time.monotonic()


def test_a_cookie_that_was_changed_is_none() -> None:
    logins = Logins("token", Clock())
    login, until, signature = logins.begin(token="token").split(".")
    later = f"{login}.{int(until) + 99999}.{signature}"
    for forged in (later, f"{login}.{until}.", f"x{login}.{until}.{signature}", "", "..", "a.b.c"):
        assert not logins.is_valid(forged)


def test_a_cookie_of_another_process_is_none() -> None:
    assert not Logins("token").is_valid(Logins("token").begin(token="token"))


def test_a_logout_ends_one_login() -> None:
    logins = Logins("token", Clock())
    mine, other = logins.begin(token="token"), logins.begin(token="token")
    logins.end(mine)
    assert (logins.is_valid(mine), logins.is_valid(other)) == (False, True)


def test_a_code_is_for_one_login_and_soon() -> None:
    clock = Clock()
    logins = Logins("token", clock)
    code = logins.new_code()
    assert logins.is_valid(logins.begin(code=code))
    with pytest.raises(Unauthorized):
        logins.begin(code=code)
    late = logins.new_code()
    clock.now += CODE_SECONDS + 1
    with pytest.raises(Unauthorized):
        logins.begin(code=late)


@pytest.mark.parametrize("wrong", [{"token": ""}, {"token": "tokens"}, {"code": ""}, {}])
def test_nothing_else_logs_in(wrong: dict[str, str]) -> None:
    with pytest.raises(Unauthorized):
        Logins("token").begin(**wrong)


def test_codes_are_bounded() -> None:
    logins = Logins("token", Clock())
    first = logins.new_code()
    for _ in range(MOST_CODES):
        logins.new_code()
    with pytest.raises(Unauthorized):
        logins.begin(code=first)
