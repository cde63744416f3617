"""Runs a command with a clean environment and a time limit, and kills all of its processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.tokens.errors import BadRequest

MARK = "LOCKSTEP_ROLLOUT"
"""Environment variable by which the processes of a rollout are found, even outside its group."""
TERM_SECONDS = 2.0
TAIL_BYTES = 4000


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """How a command ended.

    `status` is None when it was stopped, `late` is true when it timed out, and `output` is the end
    of its output.
    """

    status: int | None
    late: bool
    output: str


async def run_command(
    command: Sequence[str],
    *,
    directory: Path,
    environment: Mapping[str, str],
    mark: str,
    log: Path,
    seconds: float,
    stop: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> ProcessEnd:
    """Run a command in `directory`; stop it after `seconds`, or when `stop` returns.

    The command gets only the variables of `environment` and writes to `log`. When this returns or
    is cancelled, all of its processes are dead. Raises BadRequest when there is no such command.
    """
    # A file and not a pipe: a process that outlives the command would keep a pipe open.
    with log.open("wb") as output:
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                cwd=directory,
                env={**environment, MARK: mark},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise BadRequest(
                f"{command[0]!r} cannot be started: {error.strerror or error}; its PATH is "
                f"{environment.get('PATH')!r}",
                param="env.options",
            ) from None
    running = asyncio.ensure_future(process.wait())
    stopping = [] if stop is None else [asyncio.ensure_future(stop())]
    try:
        ended, _ = await asyncio.wait(
            [running, *stopping], timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )
        status = running.result() if running in ended else None
        for task in ended.intersection(stopping):
            task.result()
        if status is None:
            _signal(process.pid, signal.SIGTERM)
            await asyncio.wait([running], timeout=TERM_SECONDS)
    finally:
        for task in stopping:
            task.cancel()
        _signal(process.pid, signal.SIGKILL)
        _kill_marked(mark)
        await running
    return ProcessEnd(status, not ended, _tail(log))


def _signal(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def _kill_marked(mark: str) -> None:
    """Kill processes that left the group of the command, as the shells of some agents do."""
    if sys.platform != "linux":
        return
    needle = f"{MARK}={mark}".encode()
    # Repeated, because a process may start another one during the scan.
    for _ in range(10):
        pids = [pid for pid in _pids() if needle in _environment(pid)]
        if not pids:
            return
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environment(pid: int) -> list[bytes]:
    # A process that has ended, or belongs to another user, is not one of ours.
    with suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []


def _tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace")
