"""Errors of rollouts: one typed error in place of the exception groups of concurrent tasks."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.tokens.errors import BadRequest, LockstepError, RolloutFailed


@contextmanager
def one_error() -> Iterator[None]:
    """Raises the first error of a task group inside, with a note of how many more there were.

    An error that Lockstep raised on purpose goes before any other.
    """
    try:
        yield
    except ExceptionGroup as failed:
        errors = sorted(_leaves(failed), key=lambda error: not isinstance(error, LockstepError))
        if len(errors) > 1:
            errors[0].add_note(f"{len(errors) - 1} more failed at the same time")
        raise errors[0] from None


@contextmanager
def from_env(env: str, where: str) -> Iterator[None]:
    """Adds to every error inside which environment it came from, and where.

    Raises RolloutFailed for an exception of the environment's own, with its place in the code.
    """
    try:
        yield
    except LockstepError as error:
        error.add_note(f"env {env!r}, {where}")
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise RolloutFailed(
            f"env {env!r} raised {type(error).__name__}: {error} ({last.filename}:{last.lineno}, "
            f"{where})",
            param="env.name",
        ) from error


def tasks_ended(env: str, split: str, count: int, needed: int) -> BadRequest:
    """The error for a task source that ended before the run did."""
    return BadRequest(
        f"env {env!r} ended after {count} {split} tasks, and the run needs {needed}: let tasks() "
        "begin again at its end, or lower loop.steps, rollout.groups or eval.prompts",
        param="env.name",
    )


def _leaves(failed: BaseExceptionGroup[Exception]) -> Iterator[Exception]:
    for error in failed.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
