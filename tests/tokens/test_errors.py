"""Errors quote what they were given, and no more than 4 kB of it."""

from __future__ import annotations

from lockstep.tokens.errors import MAX_MESSAGE, CheckpointError, PrefixBreak


def test_a_message_that_quotes_megabytes_is_cut() -> None:
    error = CheckpointError(f"the tensor {'x' * (5 << 20)} does not fit")
    assert error.message.startswith("the tensor xxx")
    assert error.message.endswith("...")
    assert len(error.message) == len(str(error)) == MAX_MESSAGE


def test_an_error_with_another_message_is_cut_as_well() -> None:
    error = PrefixBreak("short", cause="truncated").with_message("y" * (1 << 20))
    assert len(error.message) == MAX_MESSAGE
    assert error.cause == "truncated"
