"""Errors of rollouts: one typed error instead of the exception group of concurrent tasks."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.tokens.errors import BadRequest, LockstepError, RolloutFailed


@contextmanager
def one_error() -> Iterator[None]:
    """Raise the first error of a task group in the block, with a note of how many others failed.

    A LockstepError takes precedence over any other exception.
    """
    try:
        yield
    except ExceptionGroup as failed:
        errors = sorted(_leaves(failed), key=lambda error: not isinstance(error, LockstepError))
        if len(errors) > 1:
            errors[0].add_note(f"{len(errors) - 1} other tasks failed at the same time")
        raise errors[0] from None


@contextmanager
def from_env(env: str, where: str) -> Iterator[None]:
    """Add the environment and `where` it failed to every error of the block.

    Raises RolloutFailed for an exception of the environment's own code, with its file and line.
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
    """Return the error for an environment that ran out of tasks."""
    return BadRequest(
        f"env {env!r} ended after {count} {split} tasks, but the run needs {needed}: let tasks() "
        "start over at its end, or lower loop.steps, rollout.groups or eval.prompts",
        param="env.name",
    )


def _leaves(failed: BaseExceptionGroup[Exception]) -> Iterator[Exception]:
    for error in failed.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
