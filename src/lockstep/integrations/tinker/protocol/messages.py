"""The protobuf messages of the API: training requests in, training and sampling results out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.integrations.tinker.protocol.protobuf import (
    MessageReader,
    as_bytes,
    as_double,
    as_int,
    as_ints,
    as_text,
    write_bytes,
    write_double,
    write_int,
    write_ints,
)
from lockstep.tokens import Completion
from lockstep.tokens.completion import Ranked
from lockstep.tokens.errors import BadRequest

DTYPES: Mapping[int, npt.DTypeLike] = {1: "<f4", 2: "<i8"}
NAMES = {0: "unspecified", 1: "float32", 2: "int64", 3: "int32", 4: "bfloat16"}
FLOAT32 = 1
NO_LOGPROB = -99999.0
"""What the API writes where a list of alternatives is shorter than asked for."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One input of a loss as it was sent: values of `shape`, or the listed cells of it (CSR)."""

    data: bytes
    dtype: int
    shape: tuple[int, ...]
    crow: bytes | None = None
    col: bytes | None = None

    def array(self, field: str) -> npt.NDArray[Any]:
        """All its values, 0 where none is listed. Raises BadRequest for sizes that do not fit."""
        if self.dtype not in DTYPES:
            raise BadRequest(
                f"{field} is {NAMES.get(self.dtype, self.dtype)}: expected float32 or int64",
                param=field,
            )
        values = _numbers(self.data, DTYPES[self.dtype], field)
        shape = self.shape or (len(values),)
        if self.crow is not None and self.col is not None:
            return self._dense(values, shape, field)
        if min(shape) < 0 or int(np.prod(shape)) != len(values):
            raise BadRequest(f"{field} has {len(values)} values for shape {shape}", param=field)
        return values.reshape(shape)

    def _dense(
        self, values: npt.NDArray[Any], shape: tuple[int, ...], field: str
    ) -> npt.NDArray[Any]:
        crow, col = (_numbers(raw or b"", "<i8", field) for raw in (self.crow, self.col))
        fits = (
            len(shape) == 2
            and len(crow) == shape[0] + 1
            and len(col) == len(values) == (crow[-1] if len(crow) else -1)
            and crow[0] == 0
            and bool((np.diff(crow) >= 0).all())
            and bool(((col >= 0) & (col < shape[1])).all())
        )
        if not fits:
            raise BadRequest(f"{field} is no sparse matrix of shape {shape}", param=field)
        dense = np.zeros(shape, dtype=values.dtype)
        dense[np.repeat(np.arange(shape[0]), np.diff(crow)), col] = values
        return dense


@dataclass(frozen=True, slots=True)
class Datum:
    """One sequence to learn from: its tokens, and the inputs of the loss by name."""

    tokens: tuple[int, ...]
    inputs: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class ForwardBackwardRequest:
    """A chunk of a forward or forward_backward call, the `seq_id`-th call of its model."""

    model_id: str
    seq_id: int
    data: tuple[Datum, ...]
    loss_fn: str
    config: dict[str, float | str]
    forward_only: bool

    @classmethod
    def decode(cls, body: bytes) -> ForwardBackwardRequest:
        """Raises BadRequest for a body that is none; values are checked when they are used."""
        values: dict[str, Any] = {"model_id": "", "seq_id": 0, "loss_fn": "", "forward_only": False}
        data: list[Datum] = []
        config: dict[str, float | str] = {}
        for number, value in MessageReader(body, "ForwardBackwardRequest").fields():
            if number == 1:
                values["model_id"] = as_text(value, "model_id")
            elif number == 2:
                values["seq_id"] = as_int(value, "seq_id")
            elif number == 3:
                data.append(_datum(as_bytes(value, "data"), f"data[{len(data)}]"))
            elif number == 4:
                values["loss_fn"] = as_text(value, "loss_fn")
            elif number in (5, 7):
                config |= _config_entry(as_bytes(value, "loss_fn_config"), texts=number == 7)
            elif number == 6:
                values["forward_only"] = bool(as_int(value, "forward_only"))
        ordered = dict(sorted(config.items()))
        return cls(data=tuple(data), config=ordered, **values)


def identity(body: bytes) -> tuple[str, int] | None:
    """Model and seq_id of a request that may be no good otherwise; None where they are not told."""
    values: dict[int, int | bytes] = {}
    try:
        for number, value in MessageReader(body, "ForwardBackwardRequest").fields():
            if number in (1, 2):
                values[number] = value
            if len(values) == 2:
                return as_text(values[1], "model_id"), as_int(values[2], "seq_id")
    except BadRequest:
        return None
    return None


def encode_forward_backward(
    logprobs: Sequence[npt.NDArray[np.float32]], metrics: Mapping[str, float]
) -> bytes:
    """A ForwardBackwardOutput: the logprobs of every datum, of shape (N,) or (N, K), and metrics.

    All datums go into one record, whose offsets count bytes.
    """
    offsets = np.cumsum([0, *(each.nbytes for each in logprobs)], dtype="<i8")
    trailing = [int(size) for size in logprobs[0].shape[1:]] if logprobs else []
    tensor = (
        write_bytes(1, b"".join(each.astype("<f4").tobytes() for each in logprobs))
        + write_bytes(2, offsets.tobytes())
        + write_int(3, FLOAT32)
        + write_ints(4, trailing)
    )
    field = write_bytes(1, "logprobs") + write_bytes(2, tensor)
    record = write_bytes(1, "ArrayRecord") + write_bytes(2, field) + write_int(3, len(logprobs))
    shown = [write_bytes(1, name) + write_double(2, value) for name, value in metrics.items()]
    return (
        write_bytes(1, "ArrayRecord")
        + write_bytes(2, record)
        + b"".join(write_bytes(3, each) for each in shown)
    )


def encode_samples(
    completions: Sequence[Completion],
    *,
    prompt_logprobs: bool = False,
    last_n: int | None = None,
    prompt_k: int = 0,
    sample_k: int = 0,
) -> bytes:
    """A SampleResponse. `last_n` leaves only the scores of that many last prompt tokens."""
    parts = [write_bytes(1, _sequence(each, sample_k)) for each in completions]
    scores = completions[0].prompt_logprobs
    if (prompt_logprobs or prompt_k) and scores is not None:
        first = 1 if last_n is None else max(1, len(scores) - last_n)
        shown = [entry if at >= first else None for at, entry in enumerate(scores)]
        if prompt_logprobs:
            values = [np.nan if entry is None else entry.logprob for entry in shown]
            parts.append(write_bytes(2, np.asarray(values, "<f4").tobytes()))
        if prompt_k:
            tops = [() if entry is None else entry.top for entry in shown]
            parts.append(write_bytes(3, _alternatives(tops, prompt_k)))
    return b"".join(parts)


def _sequence(completion: Completion, k: int) -> bytes:
    out = write_int(1, int(completion.finish == "length"))
    out += write_bytes(2, np.asarray(completion.token_ids, "<i4").tobytes())
    out += write_bytes(3, np.asarray(completion.logprobs, "<f4").tobytes())
    if k:
        out += write_bytes(4, _alternatives(completion.top_logprobs or [], k))
    return out


def _alternatives(rows: Sequence[Sequence[Ranked]], k: int) -> bytes:
    """The k most likely tokens of each row; cells beyond them say that there is none."""
    ids = np.zeros((len(rows), k), "<i4")
    logprobs = np.full((len(rows), k), NO_LOGPROB, "<f4")
    for at, row in enumerate(rows):
        for place, entry in enumerate(row[:k]):
            ids[at, place], logprobs[at, place] = entry.token_id, entry.logprob
    return (
        write_bytes(1, ids.tobytes())
        + write_bytes(2, logprobs.tobytes())
        + write_int(3, k)
        + write_int(4, len(rows))
    )


def _datum(body: bytes, field: str) -> Datum:
    tokens: list[int] = []
    inputs: dict[str, Tensor] = {}
    for number, value in MessageReader(body, "Datum").fields():
        if number == 1:
            tokens += _chunk(as_bytes(value, field), f"{field}.model_input")
        elif number == 2:
            name, raw = _entry(as_bytes(value, field), f"{field}.loss_fn_inputs")
            inputs[name] = _tensor(as_bytes(raw, name), f"{field}.loss_fn_inputs.{name}")
    return Datum(tuple(tokens), dict(sorted(inputs.items())))


def _chunk(body: bytes, field: str) -> Iterator[int]:
    for number, value in MessageReader(body, "ModelInputChunk").fields():
        if number != 1:
            raise BadRequest(f"{field} has an image or audio: only text is taken here", param=field)
        for inner, raw in MessageReader(as_bytes(value, field), "EncodedText").fields():
            if inner == 1:
                yield from _numbers(as_bytes(raw, field), "<i4", field).tolist()


def _tensor(body: bytes, field: str) -> Tensor:
    values: dict[str, Any] = {"data": b"", "dtype": 0}
    shape: list[int] = []
    for number, value in MessageReader(body, "Tensor").fields():
        if number == 1:
            values["data"] = as_bytes(value, field)
        elif number == 2:
            names = {1: "data", 2: "crow", 3: "col"}
            values |= {"data": b"", "crow": b"", "col": b""}
            for inner, raw in MessageReader(as_bytes(value, field), "SparseCsr").fields():
                if inner in names:
                    values[names[inner]] = as_bytes(raw, field)
        elif number == 3:
            values["dtype"] = as_int(value, field)
        elif number == 4:
            shape += as_ints(value, field)
    return Tensor(shape=tuple(shape), **values)


def _entry(body: bytes, field: str) -> tuple[str, int | bytes]:
    key, entry = "", b""
    for number, value in MessageReader(body, "map entry").fields():
        if number == 1:
            key = as_text(value, field)
        elif number == 2:
            entry = as_bytes(value, field)
    return key, entry


def _config_entry(body: bytes, *, texts: bool) -> dict[str, float | str]:
    key, raw = _entry(body, "loss_fn_config")
    if not texts:
        return {key: as_double(raw or bytes(8), f"loss_fn_config.{key}")}
    entry: dict[str, float | str] = {key: 0.0}
    for number, value in MessageReader(as_bytes(raw, key), "LossConfigValue").fields():
        name = f"loss_fn_config.{key}"
        entry[key] = as_double(value, name) if number == 1 else as_text(value, name)
    return entry


def _numbers(raw: bytes, dtype: npt.DTypeLike, field: str) -> npt.NDArray[Any]:
    size = np.dtype(dtype).itemsize
    if len(raw) % size:
        raise BadRequest(f"{field} has {len(raw)} bytes, no multiple of {size}", param=field)
    return np.frombuffer(raw, dtype)
