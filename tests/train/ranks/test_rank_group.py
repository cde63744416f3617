"""A rank that is lost is named by the others, and no wait is without a limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.tokens.errors import BadRequest
from lockstep.train.ranks.rank_group import check_device
from tests.ranks import run_ranks
from tests.train.ranks import groups


def test_a_rank_that_fails_is_named_with_its_error(tmp_path: Path) -> None:
    first, second = run_ranks(2, tmp_path, groups.fail, "failed")
    assert first.startswith("rank 1 of 2 failed: ValueError: no memory left; rank 0 was ")
    assert second == "ValueError: no memory left"


@pytest.mark.failure_mode("F87")
def test_a_rank_that_ends_without_a_word_is_named(tmp_path: Path) -> None:
    first, second = run_ranks(2, tmp_path, groups.fail, "killed")
    assert first.startswith("rank 1 of 2 was killed, hangs, or has lost its connection; rank 0 was")
    assert second == "killed"


def test_a_rank_stops_waiting_for_commands_when_rank_0_is_silent(tmp_path: Path) -> None:
    _, second = run_ranks(2, tmp_path, groups.follow_nobody)
    assert second.startswith("rank 0 of 2 was killed, hangs, or has lost its connection")


def test_adapters_are_refused_by_every_rank(tmp_path: Path) -> None:
    for message in run_ranks(2, tmp_path, groups.refuse_adapters, tmp_path):
        assert message.startswith("learner.lora_rank is 4: adapters train on one rank")


def test_a_rank_takes_the_gpu_of_its_number() -> None:
    check_device("cpu")
    with pytest.raises(BadRequest, match="'cuda:1': with several ranks expected"):
        check_device("cuda:1")
