"""Ranks of a trainer as real processes that find each other by a file and speak gloo."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

LIMIT = 150.0
context = multiprocessing.get_context("forkserver")
# Imported once: every rank is a fork of the server.
context.set_forkserver_preload(["tests.rank_imports"])


def run_ranks(count: int, directory: Path, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `work(rank, *arguments)` returns on each rank, or the text of its error."""
    directory.mkdir(parents=True, exist_ok=True)
    store = directory / f"store-{time.monotonic_ns()}"
    pipes = [context.Pipe(duplex=False) for _ in range(count)]
    ranks = [
        context.Process(
            target=_main, args=(rank, count, store, pipes[rank][1], work, arguments), daemon=True
        )
        for rank in range(count)
    ]
    for rank in ranks:
        rank.start()
    for _, sending in pipes:
        sending.close()
    deadline = time.monotonic() + LIMIT
    try:
        return [_result(receiving, deadline) for receiving, _ in pipes]
    finally:
        for rank in ranks:
            rank.join(5)
            if rank.is_alive():
                rank.kill()


def _result(receiving: Connection, deadline: float) -> Any:
    if not receiving.poll(max(deadline - time.monotonic(), 0.0)):
        raise TimeoutError(f"a rank has not ended within {LIMIT:g} s")
    try:
        return receiving.recv()
    except EOFError:
        return "killed"


def _main(
    rank: int,
    count: int,
    store: Path,
    sending: Connection,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=count,
        timeout=timedelta(seconds=LIMIT),
    )  # fmt: skip
    try:
        result = work(rank, *arguments)
    except Exception as error:
        traceback.print_exc()
        result = f"{type(error).__name__}: {error}"
    sending.send(result)
    os._exit(0)  # a rank that the others wait for is not waited for
