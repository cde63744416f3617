"""Request bodies of the control plane, with prime-rl's names."""

from __future__ import annotations

from typing import Literal

import msgspec

from lockstep.protocol.control.worker import TensorSpec


class _Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    pass


class EmptyFleetBody(_Body):
    pass


class UpdateWeights(_Body):
    """New weights from a directory; or, with `tensors`, from shared memory or a broadcast group.

    `version` defaults to the directory's name, plus a digest if that name refers to other weights.
    `version_uid` belongs to another prime-rl transport: null here.
    """

    weight_dir: str | None = None
    version_uid: None = None
    version: str | None = None
    mode: Literal["keep", "wait", "abort"] = "keep"
    shared_memory: str | None = None
    group: str | None = None
    tensors: list[TensorSpec] | None = None


class PauseFleet(_Body):
    mode: Literal["keep", "wait", "abort"] | None = None
    clear_cache: bool | None = None
    lease_seconds: float | None = None


class LoadAdapter(_Body):
    lora_name: str
    lora_path: str
    version: str | None = None
    load_inplace: bool | None = None


class UnloadAdapter(_Body):
    lora_name: str


class InitBroadcaster(_Body):
    """Address where rank 0, the trainer, hosts the group. The fields below the line are prime-rl's.

    prime-rl counts ranks per server; here the fleet assigns each worker its own.
    """

    host: str
    port: int
    group: str = "weights"
    backend: Literal["gloo", "nccl"] = "gloo"
    timeout: float = 60.0

    rank_offset: int | None = None
    inference_world_size: int | None = None
    gpus_per_server: int | None = None
    quantize_in_weight_transfer: bool | None = None


class AddWorker(_Body):
    """A worker to add; `admin_url` is its system port, by default its admin routes are at `url`.

    `logprob_mode` is for servers that do not report theirs, such as vLLM. `gpus` are those it was
    placed on, for the state page.
    """

    url: str
    admin_url: str | None = None
    admin_token: str | None = None
    backend: str = "auto"
    id: str | None = None
    logprob_mode: Literal["processed", "raw"] | None = None
    gpus: tuple[str, ...] = ()
