"""A setting: everything that decides which logprob a token gets.

A hypothesis is a change of the setting that both sides should have. Settings are values: they
compose, they are the keys of stored results, and they are what a verdict reports.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

Rounding = Literal["bfloat16", "float16", "int8", "int4", "fp8"]
Rows = Literal["own", "after", "before", "prompt start", "prompt end"]
Boundary = Literal["prompt", "turn before", "last turn", "version"]
ALL = ("*",)
"""All tensors of a checkpoint."""


@dataclass(frozen=True, slots=True)
class Overlay:
    """Tensors that come from another checkpoint; `negated` means all others than those named."""

    source: Path
    names: tuple[str, ...] = ALL
    negated: bool = False

    def takes(self, name: str) -> bool:
        """Return whether this tensor comes from the other checkpoint."""
        return self.names == ALL or ((name in self.names) != self.negated)


@dataclass(frozen=True, slots=True)
class StaleCache:
    """Keys and values before a boundary that were computed by another checkpoint."""

    source: Path
    boundary: Boundary
    block: int = 1
    """The boundary is rounded down to a multiple of this."""


@dataclass(frozen=True, slots=True)
class Context:
    """A change of the tokens in front of the sampled ones.

    "insert" puts `ids` before the sequence, and "drop" removes its first `count` tokens. "pad"
    fills on the left to the longest sequence, and "packed" puts the previous sample in front;
    neither is masked. "truncate" keeps the last `count` tokens of the first prompt. "replace" has
    the ids in front of each turn, as (sample, turn, ids).
    """

    kind: Literal["insert", "drop", "pad", "packed", "truncate", "replace"]
    ids: tuple[int, ...] = ()
    count: int = 0
    turns: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    restart: bool = False
    """Whether positions restart at the sequence's own first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How logprobs are computed. The defaults are the checkpoint's own weights in float32, read as
    the samples say.

    The fields up to `rows` change the logits and cost a forward pass; the others change how numbers
    are read out of the same logits.
    """

    overlay: Overlay | None = None
    adapter: Path | None = None
    adapter_scale: float = 1.0
    compute: str = "float32"
    rounding: Rounding | None = None
    jitter: float = 0.0
    head: Rounding | None = None
    rope_theta: float | None = None
    rope_factor: float = 1.0
    plain_rope: bool = False
    eps: float | None = None
    normalize_experts: bool | None = None
    experts: Literal["own", "recorded", "dummy last"] = "own"
    kv: Rounding | None = None
    window: int | None = None
    stale: StaleCache | None = None
    context: Context | None = None
    rows: Rows = "own"

    mode: Literal["recorded", "raw", "processed"] = "recorded"
    temperature: float | None = None
    shaping: tuple[tuple[str, Any], ...] | None = None
    support: Literal["recorded", "ignored"] = "recorded"
    logits: Rounding | None = None
    read: Literal["sampled", "most likely"] = "sampled"

    def with_(self, **changes: Any) -> Setting:
        """Return a copy with these fields changed."""
        return replace(self, **changes)

    @property
    def forward(self) -> Setting:
        """The same setting with default readings: what a forward pass depends on."""
        return replace(self, **READINGS)

    @property
    def altered(self) -> bool:
        """Whether attention or its tokens differ from the model's own."""
        return any((self.kv, self.window, self.stale, self.context))

    def changes_from(self, other: Setting) -> dict[str, Any]:
        """Return the fields that differ from `other`, for a report, without local directories."""
        mine, theirs = asdict(self), asdict(other)
        return {name: _named(value) for name, value in mine.items() if value != theirs[name]}


READINGS: dict[str, Any] = {
    item.name: item.default
    for item in fields(Setting)
    if item.name in ("mode", "temperature", "shaping", "support", "logits", "read")
}


def _named(value: Any) -> Any:
    if isinstance(value, Path):
        return value.name
    if isinstance(value, dict):
        return {key: _named(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_named(item) for item in value][:64]
    return value
