"""Device and host memory of one batch size: the inputs and results of the rows of a step."""

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
    """One sequence of a step: its last token, where that is written, and how the next is drawn.

    `position` is its position in the slot; after a prefill, the row of its hidden state.
    """

    slot: int
    position: int
    token: int
    uniform: float
    temperature: float
    processed: bool
    tops: int = 0
    """Number of most likely tokens to return with their logprobs."""


class _Likeliest(NamedTuple):
    """The most likely tokens of each row, copied to the host: ids and logits, (rows, most)."""

    ids: Tensor
    logits: Tensor


class _HostWords(NamedTuple):
    """Pinned memory of one step: `up` is copied to its table, `down` from it."""

    up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A launched step. Call `read` once; it waits for the tokens."""

    table: Table
    rows: Seq[GraphRow]
    host: _HostWords
    likeliest: _Likeliest | None
    finished: torch.cuda.Event | None

    def read(self) -> list[Sampled]:
        """Wait for the step; return the token of each row, in the order of the launch."""
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
        # The same formula as in the kernel: (logit - highest) / temperature - log of the sum.
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
    """The rows of one batch size as a matrix of 32-bit words.

    Its rows are positions, slots, processed, temperatures, uniforms, tokens, logprobs, ranks,
    highest logits and logarithms of the sums of shares. A decode step reads its input from `tokens`
    and writes its result there, so that the next step can follow at once. `logits` is a view of a
    buffer that all tables of one kind share.
    """

    def __init__(self, logits: Tensor) -> None:
        rows, device = logits.shape[0], logits.device
        self.logits = logits
        self.words = torch.zeros((10, rows), dtype=torch.int32, device=device)
        self.positions, self.slots, self.processed = self.words[:3]
        self.temperatures, self.uniforms = self.words[3:5].view(torch.float32)
        self.tokens, logprobs, self.ranks, highest, logs = self.words[5:]
        self._floats = [words.view(torch.float32) for words in (logprobs, highest, logs)]
        self.graph: torch.cuda.CUDAGraph | None = None
        self._free: list[_HostWords] = []
        self._host = self._take()

    def fill(self, rows: Seq[GraphRow], spare: int) -> None:
        """Copy a new batch to the device. Rows beyond it use the slot `spare`."""
        self._host = self._take()
        slots, positions, tokens, uniforms, temperatures, processed, _ = zip(*rows, strict=True)
        up, n = self._host.up.numpy(), len(rows)
        up[:] = 0
        up[1] = spare
        up[0, :n], up[1, :n], up[2, :n], up[5, :n] = positions, slots, processed, tokens
        # One copy for all rows of words: floats are stored as their bits.
        floats = up[3:5].view(np.float32)
        floats[0, :n], floats[1, :n] = temperatures, uniforms
        self.words[:6].copy_(self._host.up, non_blocking=True)

    def refill(self, uniforms: Seq[float]) -> None:
        """Copy new random numbers to the device, for a batch that is otherwise unchanged."""
        self._host = self._take()
        up = self._host.up[4]
        up.numpy().view(np.float32)[: len(uniforms)] = uniforms
        self.words[4].copy_(up, non_blocking=True)

    def draw(self) -> None:
        """Draw a token for every row of the logits."""
        logprobs, highest, logs = self._floats
        draw(
            self.logits, self.uniforms, self.temperatures, self.processed,
            self.tokens, logprobs, self.ranks, highest, logs,
        )  # fmt: skip

    def fetch(self, rows: Seq[GraphRow]) -> StepInFlight:
        """Start copying the results to the host. Call it once after each `fill` or `refill`."""
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
        """Return the memory of a step that has been read, for reuse."""
        self._free.append(host)

    def _take(self) -> _HostWords:
        """Return memory that no step in flight uses. Any number of steps may be in flight."""
        if self._free:
            return self._free.pop()
        rows, pinned = self.words.shape[1], self.words.is_cuda
        return _HostWords(
            torch.zeros((6, rows), dtype=torch.int32, pin_memory=pinned),
            torch.zeros((5, rows), dtype=torch.int32, pin_memory=pinned),
        )


def _to_host(tensor: Tensor) -> Tensor:
    """Return a pinned host copy, valid only after an event recorded behind it."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def bucket(rows: int) -> int:
    """Return the batch size for so many rows: powers of two up to 32, then multiples of 32."""
    return 1 << (rows - 1).bit_length() if rows <= 32 else -(-rows // 32) * 32


def buckets(rows: int) -> list[int]:
    """Return all batch sizes for up to `rows` rows."""
    return sorted({bucket(count) for count in range(1, rows + 1)})


def powers(rows: int) -> list[int]:
    """Return the powers of two up to the first that is at least `rows`."""
    return [1 << at for at in range((rows - 1).bit_length() + 1)]
