"""The options of an engine, and their command-line flags. This module imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from lockstep.flags import Flag, check_ranges
from lockstep.tokens import LogprobMode
from lockstep.tokens.errors import BadRequest
from lockstep.tokens.versions import check_label

MB = 1 << 20
engine_flag = partial(Flag, panel="Engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options of an engine. Raises BadRequest for an invalid value.

        EngineOptions(arithmetic="exact", max_seqs=16, weight_version="step-7")

    `arithmetic` "exact" gives logprobs that do not depend on the batch and equal a trainer's bit
    for bit (in fp32 on a CPU, in any dtype on a GPU). "portable" gives the same bits on every make
    of x86 CPU, several times slower. "close" uses the fastest kernels. "auto" is exact where a
    self-test passes, else close. The KV cache holds `max_seqs` slots of `max_model_len` tokens, or
    fewer when they do not fit in `kv_bytes`. On a GPU, kernels are compiled and graphs captured
    before the engine starts, for at most `warm_seconds`.
    """

    device: Annotated[str, engine_flag("cpu or cuda.")] = "cpu"
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        engine_flag("Data type of weights and KV cache."),
    ] = "float32"
    arithmetic: Annotated[
        Literal["auto", "exact", "portable", "close"],
        engine_flag(
            "exact: logprobs equal the trainer's bit for bit; portable: also when the trainer's "
            "CPU is of another make; close: the fastest kernels; auto: exact if a self-test at "
            "start passes, else close."
        ),
    ] = "auto"
    threads: Annotated[int, engine_flag("Threads that torch computes with.", min=1)] = 1
    max_model_len: Annotated[
        int | None,
        engine_flag("Most tokens of prompt and completion; by default the model's limit."),
    ] = None
    max_seqs: Annotated[
        int, engine_flag("Most sequences in one batch.", name="max_num_seqs", min=1)
    ] = 64
    max_batch_tokens: Annotated[
        int, engine_flag("Most tokens in one step.", name="max_num_batched_tokens", min=1)
    ] = 1024
    kv_bytes: Annotated[
        int,
        engine_flag(
            "Megabytes of KV cache for running sequences.", name="kv_cache_mb", unit=MB, min=1
        ),
    ] = 2048 * MB
    prefix_cache_bytes: Annotated[
        int,
        engine_flag(
            "Megabytes of KV cache for shared prefixes; 0: off.",
            name="prefix_cache_mb",
            unit=MB,
            min=0,
        ),
    ] = 256 * MB
    logprob_mode: Annotated[
        LogprobMode,
        engine_flag(
            "processed: logprobs of the distribution that tokens are drawn from, after "
            "temperature, top-p, penalties and the like; raw: logprobs of the model's own "
            "distribution. Requests may choose the other.",
            name="logprobs_mode",
        ),
    ] = "processed"
    weight_version: Annotated[
        str, engine_flag("Version label of the weights that the worker starts with.")
    ] = "default"
    worker: Annotated[
        str | None, engine_flag("Name of this worker in its responses.", name="worker_id")
    ] = None
    max_adapters: Annotated[
        int, engine_flag("Most LoRA adapters at a time.", name="max_loras", min=0)
    ] = 32
    max_lora_rank: Annotated[int, engine_flag("Highest rank of a LoRA adapter.", min=1)] = 64
    warm_seconds: Annotated[
        float,
        engine_flag(
            "On a GPU: most seconds to compile kernels and capture graphs before the worker is "
            "ready.",
            min=0,
        ),
    ] = 300.0

    def __post_init__(self) -> None:
        check_ranges(self)
        check_label(self.weight_version)
        if self.arithmetic in ("exact", "portable") and (problem := self.why_not_exact):
            raise BadRequest(
                f"{self.arithmetic} arithmetic needs {problem}: use arithmetic close or auto",
                param="arithmetic",
            )

    @property
    def why_not_exact(self) -> str | None:
        """The requirement of exact arithmetic that this device and dtype do not meet, or None."""
        on_gpu = self.device.startswith("cuda") and self.arithmetic != "portable"
        if not on_gpu and (self.device != "cpu" or self.dtype != "float32"):
            return f"device cpu and dtype float32, got {self.device} and {self.dtype}"
        return None
