"""The worker's control dialect, POST /engine/<method>: Dynamo's names, and the weight transaction.

Each method has one typed body; unknown fields are refused.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class _Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    pass


class Nothing(_Body):
    pass


class Pause(_Body):
    mode: Literal["keep", "wait", "abort"] = "keep"
    clear_cache: bool = False


class Abort(_Body):
    request_id: str


class FromDisk(_Body):
    """`weight_version` defaults to the directory's name."""

    model_path: str
    weight_version: str | None = None


class JoinGroup(_Body):
    master_address: str
    master_port: int
    rank: int
    world_size: int
    group_name: str = "weights"
    backend: Literal["gloo", "nccl"] = "gloo"
    timeout_seconds: float = 60.0


class LeaveGroup(_Body):
    group_name: str = "weights"


class FromGroup(_Body):
    """Tensors that rank 0 is about to broadcast, in this order."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    weight_version: str
    group_name: str = "weights"


class LoadLora(_Body):
    """Version spans name the contents by a hash of them, after `version` where one is given."""

    lora_name: str
    lora_path: str
    version: str | None = None
    load_inplace: bool = True


class UnloadLora(_Body):
    lora_name: str


class Commit(_Body):
    """With `weight_version`, refuses to commit anything else than that staged version."""

    weight_version: str | None = None


class Probe(_Body):
    """Scores sequences under the live (or staged) weights, and compares when `logprobs` come along.

    `logprobs[i]` has one entry per token of `token_ids[i]` after the first.
    """

    token_ids: list[list[int]]
    logprobs: list[list[float]] | None = None
    tolerance: float = 0.0
    lora_name: str | None = None
    staged: bool = False
