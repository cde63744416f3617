"""Starts the ranks of a run on this machine, and ends them all when one of them is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType
from typing import IO, Any

import torch.distributed as dist

from lockstep.tokens.exit_codes import TRY_AGAIN
from lockstep.train.ranks.rank_group import (
    SILENT_SECONDS,
    Heard,
    failure_of,
    heartbeat_of,
    lost_text,
    prefixed,
)

POLL_SECONDS = 0.05
STOP_SECONDS = 10.0
"""How long a rank may take to end after SIGTERM."""
HOST = "127.0.0.1"
SHOWN_LINES = 20
"""Last lines of the output of a failed rank that are printed. Rank 0 prints its own."""


@dataclass(slots=True)
class _Rank:
    process: subprocess.Popen[bytes]
    output: IO[bytes] | None


@dataclass(frozen=True, slots=True)
class RanksOutcome:
    """The exit code of a run, and which rank was lost and why, unless rank 0 has said it."""

    code: int
    lost: str | None = None


def run_ranks(count: int, arguments: Sequence[str]) -> RanksOutcome:
    """Run the `lockstep` command with these arguments on `count` ranks, to its end.

    Rank 0 has the terminal. When a rank is killed, fails or hangs, the others are ended. The store
    of the ranks is in this process, so that it outlives each of them.
    """
    store: Any = dist.TCPStore(  # type: ignore[attr-defined]
        HOST, 0, is_master=True, wait_for_workers=False
    )
    with ExitStack() as stack:
        ranks: list[_Rank] = []
        stack.callback(_stop, ranks)
        for rank in range(count):
            output = stack.enter_context(tempfile.TemporaryFile()) if rank else None
            process = subprocess.Popen(
                [sys.executable, "-m", "lockstep.cli.parent_death", str(os.getpid()), *arguments],
                env=environment(rank, count, store.port),
                stdin=subprocess.DEVNULL if rank else None,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C reaches this process, which sends it to rank 0
            )
            ranks.append(_Rank(process, output))

        def forward(number: int, _: FrameType | None) -> None:
            ranks[0].process.send_signal(number)

        for number in (signal.SIGINT, signal.SIGTERM):
            stack.callback(signal.signal, number, signal.signal(number, forward))
        return _watch(ranks, prefixed(store.clone()))


def environment(rank: int, count: int, port: int) -> Mapping[str, str]:
    """Return the environment of a rank: the variables that torchrun sets."""
    return {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        # Ranks connect to the store of this process instead of opening one in rank 0.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _watch(ranks: Sequence[_Rank], store: Any) -> RanksOutcome:
    """Wait until all ranks have ended, or until one is lost."""
    heard = [Heard() for _ in ranks]
    while True:
        codes = [rank.process.poll() for rank in ranks]
        if any(codes):
            return _explain(ranks, codes, store)
        if None not in codes:
            return RanksOutcome(0)
        for rank, code in enumerate(codes):
            beats = heartbeat_of(store, rank)
            if code is None and beats and heard[rank].silence(beats) > SILENT_SECONDS:
                return RanksOutcome(TRY_AGAIN, lost_text(rank, len(ranks), None))
        time.sleep(POLL_SECONDS)


def _explain(ranks: Sequence[_Rank], codes: Sequence[int | None], store: Any) -> RanksOutcome:
    """Return which rank was lost first. The others may have ended because of it."""
    count = len(ranks)
    for rank, code in enumerate(codes):
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            text = f"rank {rank} of {count} was killed by {name}"
            return RanksOutcome(TRY_AGAIN, "\n".join([text, *_last_lines(ranks[rank])]))
    for rank, code in enumerate(codes):
        report = failure_of(store, rank)
        if code and not (report is not None and report["other"]):
            if rank == 0:
                return RanksOutcome(code)
            text = f"rank {rank} of {count} failed:"
            return RanksOutcome(code, "\n".join([text, *_last_lines(ranks[rank])]))
    return RanksOutcome(TRY_AGAIN)


def _last_lines(rank: _Rank) -> list[str]:
    if rank.output is None:
        return []
    rank.output.seek(0)
    return rank.output.read().decode(errors="replace").splitlines()[-SHOWN_LINES:]


def _stop(ranks: Sequence[_Rank]) -> None:
    running = [rank.process for rank in ranks if rank.process.poll() is None]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + STOP_SECONDS
    for process in running:
        try:
            process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
