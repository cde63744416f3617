"""The protobuf messages of the API: training requests in, training and sampling results out.

`tinker.proto` declares them, and `tinker_pb2.py` is generated from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from lockstep.integrations.tinker.protocol import tinker_pb2
from lockstep.tokens import Completion
from lockstep.tokens.completion import Ranked
from lockstep.tokens.errors import BadRequest

pb: Any = tinker_pb2
"""The generated messages. protobuf creates their classes at import, without types."""
DTYPES: Mapping[int, npt.DTypeLike] = {pb.FLOAT32: "<f4", pb.INT64: "<i8"}
NO_LOGPROB = -99999.0
"""The logprob of an empty cell, where a token has fewer alternatives than requested."""
IDENTITY_BYTES = 1024
"""Where model_id and seq_id are looked for in a request that cannot be read as a whole."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One input of a loss as it was sent: all values of `shape`, or its listed cells (CSR)."""

    data: bytes
    dtype: int
    shape: tuple[int, ...]
    crow: bytes | None = None
    col: bytes | None = None

    def array(self, field: str) -> npt.NDArray[Any]:
        """Return all values, 0 where none is listed. Raises BadRequest if the sizes do not fit."""
        if self.dtype not in DTYPES:
            names = {value: name.lower() for name, value in pb.DType.items()}
            raise BadRequest(
                f"{field} is {names.get(self.dtype, self.dtype)}: expected float32 or int64",
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
            raise BadRequest(f"{field} is not a sparse matrix of shape {shape}", param=field)
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
        """Raises BadRequest for a body that is not one; values are checked when they are used."""
        try:
            message = pb.ForwardBackwardRequest.FromString(body)
        except DecodeError as error:
            raise BadRequest(
                f"the body is not a ForwardBackwardRequest message: {error}", param="body"
            ) from None
        config: dict[str, float | str] = dict(message.loss_fn_config)
        for key, value in message.loss_fn_config_v2.items():
            config[key] = value.text if value.HasField("text") else value.number
        return cls(
            message.model_id,
            message.seq_id,
            tuple(_datum(datum, f"data[{at}]") for at, datum in enumerate(message.data)),
            message.loss_fn,
            dict(sorted(config.items())),
            message.forward_only,
        )


def _datum(datum: Any, field: str) -> Datum:
    tokens: list[int] = []
    for chunk in datum.model_input:
        if not chunk.HasField("encoded_text"):
            raise BadRequest(
                f"{field}.model_input has an image or audio: only text is supported",
                param=f"{field}.model_input",
            )
        tokens += _numbers(chunk.encoded_text.tokens, "<i4", f"{field}.model_input").tolist()
    inputs = {name: _tensor(tensor) for name, tensor in sorted(datum.loss_fn_inputs.items())}
    return Datum(tuple(tokens), inputs)


def _tensor(tensor: Any) -> Tensor:
    shape = tuple(tensor.shape)
    if not tensor.HasField("sparse_csr"):
        return Tensor(tensor.dense, tensor.dtype, shape)
    sparse = tensor.sparse_csr
    return Tensor(sparse.values, tensor.dtype, shape, sparse.crow, sparse.col)


def _numbers(raw: bytes, dtype: npt.DTypeLike, field: str) -> npt.NDArray[Any]:
    size = np.dtype(dtype).itemsize
    if len(raw) % size:
        raise BadRequest(f"{field} has {len(raw)} bytes, no multiple of {size}", param=field)
    return np.frombuffer(raw, dtype)


def identity(body: bytes) -> tuple[str, int] | None:
    """Return model_id and seq_id of a request that cannot be read otherwise; None without them.

    They are its first fields. A rejected call must be counted, or the calls after it would wait for
    its seq_id for ever.
    """
    for end in range(1, min(len(body), IDENTITY_BYTES) + 1):
        try:
            message = pb.ForwardBackwardRequest.FromString(body[:end])
        except DecodeError:  # the prefix ends within a field
            continue
        if message.model_id and message.seq_id:
            return message.model_id, message.seq_id
    return None


def encode_forward_backward(
    logprobs: Sequence[npt.NDArray[np.float32]], metrics: Mapping[str, float]
) -> bytes:
    """Return a ForwardBackwardOutput: the logprobs (N,) or (N, K) of every datum, and metrics."""
    tensor = pb.BatchedTensor(
        data=b"".join(own.astype("<f4").tobytes() for own in logprobs),
        offsets=np.cumsum([0, *(own.nbytes for own in logprobs)], dtype="<i8").tobytes(),
        dtype=pb.FLOAT32,
        trailing_shape=logprobs[0].shape[1:] if logprobs else (),
    )
    record = pb.ArrayRecord(
        type_tag="ArrayRecord", fields={"logprobs": tensor}, num_datums=len(logprobs)
    )
    output = pb.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics=metrics
    )
    return bytes(output.SerializeToString())


def encode_samples(
    completions: Sequence[Completion],
    *,
    prompt_logprobs: bool = False,
    last_n: int | None = None,
    prompt_k: int = 0,
    sample_k: int = 0,
) -> bytes:
    """Return a SampleResponse. With `last_n` only that many last prompt tokens have a logprob."""
    response = pb.SampleResponse(sequences=[_sequence(own, sample_k) for own in completions])
    scores = completions[0].prompt_logprobs
    if (prompt_logprobs or prompt_k) and scores is not None:
        first = 1 if last_n is None else max(1, len(scores) - last_n)
        entries = [entry if at >= first else None for at, entry in enumerate(scores)]
        if prompt_logprobs:
            values = [np.nan if entry is None else entry.logprob for entry in entries]
            response.prompt_logprobs = np.asarray(values, "<f4").tobytes()
        if prompt_k:
            tops = [() if entry is None else entry.top for entry in entries]
            response.topk_prompt_logprobs.CopyFrom(_topk(tops, prompt_k))
    return bytes(response.SerializeToString())


def _sequence(completion: Completion, k: int) -> Any:
    return pb.SampledSequence(
        stop_reason=pb.LENGTH if completion.finish == "length" else pb.STOP,
        tokens=np.asarray(completion.token_ids, "<i4").tobytes(),
        logprobs=np.asarray(completion.logprobs, "<f4").tobytes(),
        topk_sampled_logprobs=_topk(completion.top_logprobs or [], k) if k else None,
    )


def _topk(rows: Sequence[Sequence[Ranked]], k: int) -> Any:
    """Return the k most likely tokens of each row; cells without a token have NO_LOGPROB."""
    ids = np.zeros((len(rows), k), "<i4")
    logprobs = np.full((len(rows), k), NO_LOGPROB, "<f4")
    for at, row in enumerate(rows):
        for place, entry in enumerate(row[:k]):
            ids[at, place], logprobs[at, place] = entry.token_id, entry.logprob
    return pb.TopkLogprobs(
        token_ids=ids.tobytes(), logprobs=logprobs.tobytes(), k=k, length=len(rows)
    )
