"""The environment is read once, and a misspelt variable is an error."""

from __future__ import annotations

import pytest

from lockstep.settings import Settings
from lockstep.tokens import errors


def test_variables_with_the_prefix_are_read_and_others_left_alone() -> None:
    settings = Settings.read({"LOCKSTEP_ADMIN_TOKEN": "secret-token", "HOME": "/nowhere"})
    assert settings.admin_token == "secret-token"


def test_an_unknown_variable_is_named_with_the_known_ones() -> None:
    with pytest.raises(errors.BadRequest, match=r"LOCKSTEP_ADMIN_TOKN.*LOCKSTEP_ADMIN_TOKEN"):
        Settings.read({"LOCKSTEP_ADMIN_TOKN": "x"})


def test_a_bad_log_level_is_refused() -> None:
    with pytest.raises(errors.BadRequest, match="loud"):
        Settings.read({"LOCKSTEP_LOG_LEVEL": "loud"})


def test_api_keys_are_separated_by_commas() -> None:
    settings = Settings.read({"LOCKSTEP_API_KEYS": "key-number-1, key-number-2,"})
    assert settings.api_keys == ("key-number-1", "key-number-2")
    assert Settings.read({}).api_keys == ()


@pytest.mark.parametrize("value", ["", " , ", "short", "long-enough-key,short"])
def test_keys_that_protect_nothing_are_refused(value: str) -> None:
    with pytest.raises(errors.BadRequest, match="LOCKSTEP_API_KEYS"):
        Settings.read({"LOCKSTEP_API_KEYS": value})
