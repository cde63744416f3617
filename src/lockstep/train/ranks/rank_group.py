"""The ranks of a run: how they meet, what rank 0 tells the others to do, and which one is lost.

Commands are announced by a key in the store by which the ranks found each other. Ranks wait for it
there while rank 0 samples rollouts: no rank is inside a collective operation while an inference
engine computes. Every wait has a limit, and every rank writes its heartbeat to the store.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist

from lockstep.tokens.errors import BadRequest, Unavailable

BEAT_SECONDS = 1.0
SILENT_SECONDS = 60.0
"""A rank without a heartbeat for this long is lost, although its connections are open."""
SEARCH_SECONDS = 4.0
"""How long to look for the rank because of which a collective operation failed."""
COLLECTIVE_SECONDS = 600.0
"""Limit of every collective operation: longer than ranks differ in the time of a pass."""
PREFIX = "lockstep-train"


class RankGroup:
    """This process as one of several ranks."""

    def __init__(self, store: Any) -> None:
        """`store` is that of the default process group, which exists already."""
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.group: Any = dist.new_group(backend="gloo")
        """Connects the ranks for values that are not tensors of a GPU."""
        # A blocking call on a store keeps other threads out: one connection for each thread.
        self._commands = prefixed(store.clone())
        self._beats = prefixed(store.clone())
        self._number = 0
        self._ended = threading.Event()
        self._heartbeat = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._heartbeat.start()

    @classmethod
    def join(cls) -> Self:
        """Meet the other ranks, which the environment of torchrun or `--ranks` describes.

        Raises Unavailable when they do not come.
        """
        here = int(os.environ.get("LOCAL_RANK", "0"))
        backend = "gloo"
        if torch.cuda.is_available():
            backend = "cpu:gloo,cuda:nccl"
            torch.cuda.set_device(here % torch.cuda.device_count())
        try:
            dist.init_process_group(backend, timeout=timedelta(seconds=COLLECTIVE_SECONDS))
        except (ValueError, dist.DistError) as error:
            raise Unavailable(f"the ranks of this run did not meet: {error}") from None
        return cls(dist.distributed_c10d._get_default_store())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Also after an error: Python aborts a process whose thread is inside torch at its end.
        self._ended.set()
        self._heartbeat.join()
        if kind is None:
            dist.destroy_process_group()

    # Commands

    def announce(self, task: str, *arguments: Any) -> None:
        """Tell the other ranks what rank 0 does now. They get the same arguments."""
        with self.working(f"waiting for {task!r}"):
            self._commands.set(f"command/{self._number}", task)
            self._number += 1
            dist.broadcast_object_list([(task, arguments)], src=0, group=self.group)

    def next_command(self) -> tuple[str, tuple[Any, ...]]:
        """Wait for rank 0's next command. Raises Unavailable when rank 0 is lost."""
        key, heard = f"command/{self._number}", Heard()
        while True:
            try:
                self._commands.wait([key], timedelta(seconds=BEAT_SECONDS))
                break
            except RuntimeError as error:
                if self._leader_is_silent(heard):
                    text = f"{self._text(0, None)} ({_first_line(error)})"
                    raise Unavailable(text) from None
        self._number += 1
        with self.working("receiving a command"):
            received: list[Any] = [None]
            dist.broadcast_object_list(received, src=0, group=self.group)
        task, arguments = received[0]
        return task, arguments

    def _leader_is_silent(self, heard: Heard) -> bool:
        try:
            return heard.silence(self._count_of(0)) > SILENT_SECONDS
        except RuntimeError:
            return True  # the store is gone, which most launchers keep in rank 0

    # Lost ranks

    @contextmanager
    def working(self, task: str) -> Iterator[None]:
        """Tell the other ranks what fails in the block.

        If it fails because of another rank, raise Unavailable that names this rank.
        """
        try:
            yield
        except RuntimeError as error:
            lost = self._find_lost()
            self._report(error, because_of_other=lost is not None)
            if lost is None:
                raise
            raise Unavailable(f"{lost}; rank {self.rank} was {task}") from error
        except Exception as error:
            self._report(error, because_of_other=False)
            raise

    def _report(self, error: Exception, *, because_of_other: bool) -> None:
        report = {"error": f"{type(error).__name__}: {error}", "other": because_of_other}
        try:
            self._beats.set(f"failed/{self.rank}", json.dumps(report))
        except RuntimeError:  # the store is gone with its process: nobody reads it any more
            return

    def _find_lost(self) -> str | None:
        """Describe the rank that failed by itself, or whose heartbeat has stopped."""
        others = [rank for rank in range(self.count) if rank != self.rank]
        try:
            before = {rank: self._count_of(rank) for rank in others}
            end = time.monotonic() + SEARCH_SECONDS
            while time.monotonic() < end:
                for rank in others:
                    report = self._report_of(rank)
                    if report is not None and not report["other"]:
                        return self._text(rank, report["error"])
                time.sleep(BEAT_SECONDS / 10)
            for rank in others:
                if self._report_of(rank) is None and self._count_of(rank) == before[rank]:
                    return self._text(rank, None)
        except RuntimeError:
            return self._text(0, None)  # most launchers keep the store in rank 0
        return None

    def _report_of(self, rank: int) -> dict[str, Any] | None:
        return failure_of(self._beats, rank)

    def _count_of(self, rank: int) -> int:
        return heartbeat_of(self._beats, rank)

    def _text(self, rank: int, error: str | None) -> str:
        return lost_text(rank, self.count, error)

    def _beat(self) -> None:
        count = 0
        while not self._ended.wait(BEAT_SECONDS if count else 0):
            count += 1
            try:
                self._beats.set(f"beat/{self.rank}", str(count))
            except RuntimeError:
                return  # the store is gone: others see that this rank is silent


def prefixed(store: Any) -> Any:
    """Return the part of the store that holds heartbeats and failures."""
    return dist.PrefixStore(PREFIX, store)  # type: ignore[attr-defined]


def heartbeat_of(store: Any, rank: int) -> int:
    """Return how often the rank has sent its heartbeat."""
    key = f"beat/{rank}"
    return int(store.get(key)) if store.check([key]) else 0


def failure_of(store: Any, rank: int) -> dict[str, Any] | None:
    """Return how the rank failed, and whether it did so because of another one."""
    key = f"failed/{rank}"
    if not store.check([key]):
        return None
    report: dict[str, Any] = json.loads(store.get(key))
    return report


def lost_text(rank: int, count: int, error: str | None) -> str:
    """Return a sentence about a rank that failed with `error`, or of which nothing is heard."""
    if error is not None:
        return f"rank {rank} of {count} failed: {error}"
    return f"rank {rank} of {count} was killed, hangs, or has lost its connection"


def check_device(device: str) -> None:
    """Raise BadRequest for a device that ranks cannot share out."""
    if device == "cpu":
        return
    here = int(os.environ.get("LOCAL_RANK", "0"))
    if device != "cuda":
        raise BadRequest(
            f"learner.device is {device!r}: with several ranks expected 'cpu' or 'cuda', because "
            "each rank takes the GPU of its number",
            param="learner.device",
        )
    if here >= torch.cuda.device_count():
        raise BadRequest(
            f"learner.device is 'cuda', but this machine has {torch.cuda.device_count()} GPUs for "
            f"{here + 1} or more ranks: start fewer ranks",
            param="learner.device",
        )


class Heard:
    """How long a heartbeat has not changed."""

    def __init__(self) -> None:
        self._count, self._since = -1, time.monotonic()

    def silence(self, count: int) -> float:
        now = time.monotonic()
        if count != self._count:
            self._count, self._since = count, now
        return now - self._since


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]
