"""The environment is read once, and a misspelt variable is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.settings import Settings, state_home
from lockstep.tokens import errors


def test_variables_with_the_prefix_are_read_and_others_left_alone() -> None:
    settings = Settings.read({"LOCKSTEP_ADMIN_TOKEN": "secret-token", "HOME": "/nowhere"})
    assert settings.admin_token == "secret-token"


def test_an_unknown_variable_is_named_with_the_known_ones() -> None:
    with pytest.raises(errors.BadRequest, match=r"LOCKSTEP_ADMIN_TOKN.*LOCKSTEP_ADMIN_TOKEN"):
        Settings.read({"LOCKSTEP_ADMIN_TOKN": "x"})


def test_a_name_close_to_a_known_one_is_told_which_was_meant() -> None:
    with pytest.raises(errors.BadRequest, match=r"did you mean LOCKSTEP_API_KEYS\?"):
        Settings.read({"LOCKSTEP_API_KEY": "a-key-of-mine"})
    with pytest.raises(errors.BadRequest) as caught:
        Settings.read({"LOCKSTEP_QUANTUM": "1"})
    assert "did you mean" not in caught.value.message


def test_what_a_run_tells_its_programs_and_what_chooses_a_client_of_verifiers_is_known() -> None:
    told = {"LOCKSTEP_ROLLOUT": "mark", "LOCKSTEP_TASK": "{}"}
    assert Settings.read(told) == Settings()
    assert Settings.read({"LOCKSTEP_VERIFIERS": "sessions"}).verifiers == "sessions"


KUBERNETES = {
    "LOCKSTEP_SERVICE_HOST": "10.0.171.239",
    "LOCKSTEP_SERVICE_PORT": "8000",
    "LOCKSTEP_SERVICE_PORT_HTTP": "8000",
    "LOCKSTEP_PORT": "tcp://10.0.171.239:8000",
    "LOCKSTEP_PORT_8000_TCP": "tcp://10.0.171.239:8000",
    "LOCKSTEP_PORT_8000_TCP_PROTO": "tcp",
    "LOCKSTEP_PORT_8000_TCP_PORT": "8000",
    "LOCKSTEP_PORT_8000_TCP_ADDR": "10.0.171.239",
}


@pytest.mark.parametrize("service", ["LOCKSTEP", "LOCKSTEP_GATEWAY"])
def test_what_kubernetes_sets_for_a_service_is_passed_over(service: str) -> None:
    injected = {name.replace("LOCKSTEP", service): value for name, value in KUBERNETES.items()}
    assert Settings.read(injected) == Settings()


@pytest.mark.parametrize("name", ["LOCKSTEP_PORT", "LOCKSTEP_SERVICE", "LOCKSTEP_HOST"])
def test_what_only_looks_like_it_is_still_an_error(name: str) -> None:
    with pytest.raises(errors.BadRequest, match=name):
        Settings.read({name: "9000"})


def test_the_admin_token_may_be_in_a_file(tmp_path: Path) -> None:
    where = tmp_path / "token"
    named = {"LOCKSTEP_ADMIN_TOKEN_FILE": str(where)}
    with pytest.raises(errors.BadRequest, match=r"LOCKSTEP_ADMIN_TOKEN_FILE .* cannot be read"):
        Settings.read(named)
    where.write_text(" \n")
    with pytest.raises(errors.BadRequest, match="is empty"):
        Settings.read(named)
    where.write_text("a-long-secret\n")
    settings = Settings.read(named)
    assert (settings.admin_token, settings.admin_token_file) == ("a-long-secret", where)
    with pytest.raises(errors.BadRequest, match="both set"):
        Settings.read({**named, "LOCKSTEP_ADMIN_TOKEN": "another-secret"})


def test_the_state_home_is_that_of_the_user() -> None:
    assert state_home({"XDG_STATE_HOME": "/var/mine"}) == Path("/var/mine/lockstep")
    for environ in ({}, {"XDG_STATE_HOME": ""}, {"XDG_STATE_HOME": "relative"}):
        assert state_home(environ) == Path.home() / ".local/state/lockstep"


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
