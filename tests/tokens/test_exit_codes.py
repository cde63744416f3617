"""Exit codes tell a supervisor whether a process is worth starting again."""

from __future__ import annotations

import pytest

from lockstep.tokens.errors import (
    BY_CODE,
    BadRequest,
    Busy,
    Conflict,
    DeadlineExceeded,
    Disproved,
    EngineFailure,
    NotExact,
    RolloutFailed,
    Superseded,
    Unavailable,
    UnknownModel,
    UnsupportedField,
)
from lockstep.tokens.exit_codes import FAILED, TRY_AGAIN, WRONG, exit_code


@pytest.mark.parametrize(
    ("code", "errors"),
    [
        (WRONG, (BadRequest, UnsupportedField, UnknownModel, Conflict, NotExact, Superseded)),
        (TRY_AGAIN, (EngineFailure, Unavailable, DeadlineExceeded, Busy)),
        (FAILED, (RolloutFailed, Disproved)),
    ],
)
def test_what_would_end_the_same_way_is_told_from_what_may_work_later(
    code: int, errors: tuple[type, ...]
) -> None:
    assert {exit_code(error("why")) for error in errors} == {code}


def test_no_error_ends_a_process_as_if_it_had_been_done() -> None:
    for error in BY_CODE.values():
        assert exit_code(error.__new__(error, "why")) in (FAILED, WRONG, TRY_AGAIN)
