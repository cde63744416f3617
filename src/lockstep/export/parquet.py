"""Samples as a Hugging Face dataset: Parquet under data/, and a README that describes the columns.

Logprobs are float32, as engines compute them, so that their bits are preserved.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.checkpoint.files import write_whole
from lockstep.export.exported import ExportedSample

ROWS = 256
"""Samples per row group, and in memory at once."""
DATA = "data/train-00000-of-00001.parquet"

_SPAN = pa.struct([("version", pa.string()), ("start", pa.int32()), ("end", pa.int32())])
_TRAINED = pa.struct([("sample", pa.int32()), ("start", pa.int32()), ("end", pa.int32())])
_STOP = pa.struct([("start", pa.int32()), ("end", pa.int32())])
_EXPERTS = pa.struct(
    [("data", pa.binary()), ("shape", pa.list_(pa.int32())), ("dtype", pa.string()),
     ("start", pa.int32())]
)  # fmt: skip
_SUPPORT = pa.struct([("counts", pa.binary()), ("data", pa.binary()), ("vocab", pa.int32())])

COLUMNS: dict[str, tuple[pa.DataType, str]] = {
    "source": (pa.string(), "the session, run or file of the sample"),
    "index": (pa.int32(), "number of the sample in its source"),
    "step": (pa.int32(), "training step, for samples of a run"),
    "advantage": (pa.float64(), "advantage, for samples of a run"),
    "reward": (pa.float64(), "null if no reward was set"),
    "token_ids": (pa.list_(pa.int32()), "the whole sequence"),
    "sampled_mask": (pa.list_(pa.bool_()), "true for sampled tokens to train on"),
    "logprobs": (pa.list_(pa.float32()), "logprobs of sampled tokens, else 0"),
    "versions": (pa.list_(_SPAN), "weight version of each range of sampled tokens"),
    "logprob_mode": (pa.string(), "raw or processed"),
    "temperature": (pa.float64(), "sampling temperature"),
    "weight": (pa.float64(), "weight of the sample in the loss"),
    "kind": (pa.string(), "kind of the branch: main, subagent, compaction ..."),
    "evidence": (pa.string(), "how the kind was found"),
    "branch": (pa.int32(), "first turn of the branch"),
    "parent": (pa.int32(), "parent branch"),
    "depth": (pa.int32(), "number of ancestors"),
    "turn_index": (pa.int32(), "last turn of the branch"),
    "harness": (pa.string(), "program that sent the requests"),
    "adapter": (pa.string(), "LoRA adapter, if any"),
    "workers": (pa.list_(pa.string()), "workers that sampled"),
    "breaks": (pa.list_(pa.string()), "causes of prefix breaks before this branch"),
    "split": (pa.list_(pa.string()), "why the branch was split into several samples"),
    "aborts": (pa.int32(), "number of aborted turns"),
    "tool_parse_errors": (pa.int32(), "turns with a tool call that could not be parsed"),
    "trained_in": (pa.list_(_TRAINED), "tokens that an earlier sample already trains"),
    "stops": (pa.list_(_STOP), "tokens that contain a stop string"),
    "experts": (_EXPERTS, "routed experts, as bytes of an array of that shape"),
    "support": (_SUPPORT, "sets that tokens were drawn from, as in `lockstep.tokens.Support`"),
    "support_absent": (pa.bool_(), "true if tokens were drawn from sets that are not recorded"),
    "shaping": (pa.string(), "JSON: sampling options besides the temperature, by token range"),
    "notes": (pa.string(), "JSON: notes that clients sent with the turns"),
}
PLAIN = ("reward", "token_ids", "sampled_mask", "logprobs", "logprob_mode", "temperature",
         "weight", "kind", "evidence", "branch", "parent", "depth", "turn_index", "harness",
         "adapter", "workers", "breaks", "split", "aborts", "tool_parse_errors",
         "support_absent")  # fmt: skip
SCHEMA = pa.schema([(name, kind) for name, (kind, _) in COLUMNS.items()])

README = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*
---
# Samples exported by Lockstep

{count} samples: sequences of token ids. Sampled tokens have the engine's own logprobs and the
weight version under which they were sampled.

| column | type | |
|---|---|---|
{columns}
"""


def write_parquet(samples: Iterable[ExportedSample], directory: Path) -> int:
    """Write the dataset into the directory and return the number of samples."""
    path = directory / DATA
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    count, rows = 0, []
    try:
        with pq.ParquetWriter(scratch, SCHEMA) as writer:
            for exported in samples:
                rows.append(_row(exported))
                if len(rows) == ROWS:
                    count += _write(writer, rows)
                    rows = []
            count += _write(writer, rows)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
    columns = "\n".join(f"| {name} | {kind} | {about} |" for name, (kind, about) in COLUMNS.items())
    readme = README.format(count=count, columns=columns)
    write_whole(directory / "README.md", readme.encode())
    return count


def _write(writer: Any, rows: list[dict[str, Any]]) -> int:
    if rows:
        writer.write_table(pa.Table.from_pylist(rows, SCHEMA))
    return len(rows)


def _row(exported: ExportedSample) -> dict[str, Any]:
    sample = exported.sample
    row = {name: getattr(sample, name) for name in PLAIN}
    row |= {name: getattr(exported, name) for name in ("source", "index", "step", "advantage")}
    row["versions"] = [msgspec.to_builtins(span) for span in sample.versions]
    row["trained_in"] = [msgspec.to_builtins(span) for span in sample.trained_in]
    row["stops"] = [{"start": start, "end": end} for start, end in sample.stops]
    row["shaping"] = msgspec.json.encode(sample.shaping).decode()
    row["notes"] = msgspec.json.encode(sample.notes).decode()
    if (experts := sample.experts) is not None:
        row["experts"] = {
            "data": bytes(experts.data),
            "shape": list(experts.shape),
            "dtype": experts.dtype,
            "start": experts.start,
        }
    if (support := sample.support) is not None:
        row["support"] = {
            "counts": bytes(support.counts),
            "data": bytes(support.data),
            "vocab": support.vocab,
        }
    return row
