"""What one batch size reads and writes on the device: rows that tokens are drawn for."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.engine.cuda.kernels.sampling_kernels import draw
from lockstep.engine.processing import HIDDEN
from lockstep.engine.sampler import Sampled
from lockstep.tokens import Ranked


class GraphRow(NamedTuple):
    """One sequence of a step: its last token, where that goes, and how the next is drawn.

    `position` is its place in the slot; after a prefill, the row of its hidden state.
    """

    slot: int
    position: int
    token: int
    uniform: float
    temperature: float
    processed: bool
    tops: int = 0
    """How many of the likeliest tokens to return with their logprobs."""


class _Likeliest(NamedTuple):
    """The likeliest tokens of each row, on their way to the host: ids and logits, (rows, most)."""

    ids: Tensor
    logits: Tensor


class _HostWords(NamedTuple):
    """Pinned memory of one step: what goes up to its table, and what comes down from it."""

    up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A launched step: `read`, once, waits for its tokens."""

    table: Table
    rows: Seq[GraphRow]
    host: _HostWords
    likeliest: _Likeliest | None
    finished: torch.cuda.Event | None

    def read(self) -> list[Sampled]:
        """The token of each row, in the order of the launch."""
        if self.finished is not None:
            self.finished.synchronize()
        words = self.host.down[:, : len(self.rows)].numpy()
        tokens, _, ranks, _, _ = words.tolist()
        logprobs, highest, logs = words[[1, 3, 4]].view(np.float32)
        self.table.give_back(self.host)
        return list(map(Sampled, tokens, logprobs.tolist(), ranks, self._tops(highest, logs)))

    def _tops(self, highest: np.ndarray, logs: np.ndarray) -> list[tuple[Ranked, ...]]:
        if self.likeliest is None:
            return [()] * len(self.rows)
        heats = [row.temperature or 1.0 if row.processed else 1.0 for row in self.rows]
        above = self.likeliest.logits.numpy() - highest[:, None]
        logprobs = above / np.array(heats, dtype=np.float32)[:, None] - logs[:, None]
        columns = zip(self.rows, self.likeliest.ids.tolist(), logprobs.tolist(), strict=True)
        return [
            tuple(
                Ranked(token, logprob, at + 1)
                for at, (token, logprob) in enumerate(zip(ids[: row.tops], values, strict=False))
                if logprob > HIDDEN
            )
            for row, ids, values in columns
        ]


class Table:
    """One matrix of 32-bit words: positions, slots, processed, temperatures, uniforms, tokens,
    logprobs, ranks, highest logits and logarithms of the sums of their shares.

    The tokens are what a decode step starts from and what it draws, so that another can follow at
    once. `logits` are a view of a buffer that all tables of one kind share.
    """

    def __init__(self, logits: Tensor) -> None:
        rows, device = logits.shape[0], logits.device
        self.logits = logits
        self.words = torch.zeros((10, rows), dtype=torch.int32, device=device)
        self.positions, self.slots, self.processed = self.words[:3]
        self.temperatures, self.uniforms = self.words[3:5].view(torch.float32)
        self.tokens, logprobs, self.ranks, highest, logs = self.words[5:]
        self._floats = [each.view(torch.float32) for each in (logprobs, highest, logs)]
        self.graph: torch.cuda.CUDAGraph | None = None
        self._free: list[_HostWords] = []
        self._host = self._take()

    def fill(self, rows: Seq[GraphRow], spare: int) -> None:
        """Puts a fresh batch on the device; rows beyond it do their work in the slot `spare`."""
        self._host = self._take()
        slots, positions, tokens, uniforms, temperatures, processed, _ = zip(*rows, strict=True)
        up, n = self._host.up.numpy(), len(rows)
        up[:] = 0
        up[1] = spare
        up[0, :n], up[1, :n], up[2, :n], up[5, :n] = positions, slots, processed, tokens
        floats = up[3:5].view(np.float32)
        floats[0, :n], floats[1, :n] = temperatures, uniforms
        self.words[:6].copy_(self._host.up, non_blocking=True)

    def refill(self, uniforms: Seq[float]) -> None:
        """New random numbers for a batch that goes on as it is."""
        self._host = self._take()
        up = self._host.up[4]
        up.numpy().view(np.float32)[: len(uniforms)] = uniforms
        self.words[4].copy_(up, non_blocking=True)

    def draw(self) -> None:
        """Draws a token for every row of the logits."""
        logprobs, highest, logs = self._floats
        draw(
            self.logits, self.uniforms, self.temperatures, self.processed,
            self.tokens, logprobs, self.ranks, highest, logs,
        )  # fmt: skip

    def fetch(self, rows: Seq[GraphRow]) -> StepInFlight:
        """Starts to copy what the step writes to the host; to be called once after each `fill` or
        `refill`."""
        host = self._host
        host.down.copy_(self.words[5:], non_blocking=True)
        likeliest = None
        if most := min(max(row.tops for row in rows), self.logits.shape[1]):
            logits, ids = self.logits[: len(rows)].topk(most, dim=-1)
            likeliest = _Likeliest(_to_host(ids), _to_host(logits.float()))
        finished = None
        if self.words.is_cuda:
            finished = torch.cuda.Event()
            finished.record()
        return StepInFlight(self, rows, host, likeliest, finished)

    def give_back(self, host: _HostWords) -> None:
        """Takes the memory of a step that was read, so that another may use it."""
        self._free.append(host)

    def _take(self) -> _HostWords:
        """Memory that no step in flight reads or writes: there may be any number of them."""
        if self._free:
            return self._free.pop()
        rows, pinned = self.words.shape[1], self.words.is_cuda
        return _HostWords(
            torch.zeros((6, rows), dtype=torch.int32, pin_memory=pinned),
            torch.zeros((5, rows), dtype=torch.int32, pin_memory=pinned),
        )


def _to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, of which only an event after it says that it is there."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def bucket(rows: int) -> int:
    """The batch size that serves so many rows: powers of two, and multiples of 32 from there."""
    return 1 << (rows - 1).bit_length() if rows <= 32 else -(-rows // 32) * 32


def buckets(rows: int) -> list[int]:
    """All batch sizes that serve up to so many rows."""
    return sorted({bucket(count) for count in range(1, rows + 1)})


def powers(rows: int) -> list[int]:
    """The powers of two up to the first that is at least `rows`."""
    return [1 << at for at in range((rows - 1).bit_length() + 1)]
