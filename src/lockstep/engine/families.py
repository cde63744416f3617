"""Supported architectures, and how the layers of each differ from those of Llama.

To add one: write a function that reads its traits from config.json, add it to FAMILIES, and add a
random model of it to tests/engine/model/test_architectures.py. If its layers need a trait that no
other has, `Model.forward` and `trainer_path`, by which the self-test compares, need it as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lockstep.tokens.errors import CheckpointError

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Differences of the layers of an architecture from those of Llama."""

    norms: Literal["inputs", "outputs", "both"] = "inputs"
    """Which sides of attention and MLP are normed: the outputs before they are added."""
    norm_offset: float = 0.0
    """Number added to the weight of every norm."""
    qk_norm: Literal["head", "row"] | None = None
    """Whether queries and keys are normed, head by head or all heads of a token at once."""
    qkv_bias: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    """Factor of the attention scores; None for head_dim ** -0.5."""
    fused: bool = False
    """Whether checkpoints hold q, k, v in one tensor, and gate and up in another."""
    rotated: float = 1.0
    """Share of each head that is rotated by its position, from its beginning."""
    unrotated: frozenset[int] = frozenset()
    """Layers without rotary position embedding."""
    window: int = 0
    """Number of keys that a query of the layers in `windowed` sees, its own included."""
    windowed: frozenset[int] = frozenset()
    window_theta: float | None = None
    """Base of the rotary frequencies of the windowed layers; None for that of the others."""

    @property
    def has_kernels(self) -> bool:
        """Whether the GPU kernels compute these layers; without them torch's own are used."""
        llama = Traits(qk_norm=self.qk_norm, qkv_bias=self.qkv_bias)
        return self == llama and self.qk_norm != "row"


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture: its short name, how to read its traits, and its defaults."""

    name: str
    traits: Callable[[Config], Traits]
    tied: bool = False
    """Default of tie_word_embeddings."""
    activation: str = "hidden_act"
    """Field of config.json that names the activation."""


def _smollm3(raw: Config) -> Traits:
    layers, interval = raw["num_hidden_layers"], raw.get("no_rope_layer_interval") or 4
    rotated = raw.get("no_rope_layers") or [(i + 1) % interval for i in range(layers)]
    return Traits(unrotated=frozenset(i for i, turns in enumerate(rotated) if not turns))


def _window(raw: Config) -> dict[str, Any]:
    """Return the traits of a window in all layers, if it is shorter than the context."""
    window = raw.get("sliding_window")
    if not window or window >= raw["max_position_embeddings"]:
        return {}
    return {"window": window, "windowed": frozenset(range(raw["num_hidden_layers"]))}


def _phi3(raw: Config) -> Traits:
    rope = raw.get("rope_parameters") or {}
    share = rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    return Traits(fused=True, rotated=share, **_window(raw))


def _olmo2(raw: Config) -> Traits:
    return Traits(norms="outputs", qk_norm="row")


def _gemma3(raw: Config) -> Traits:
    for field in (
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "use_bidirectional_attention",
    ):
        if raw.get(field):
            raise CheckpointError(
                f"config.json sets {field} to {raw[field]!r}, which this engine does not support"
            )
    layers, pattern = raw["num_hidden_layers"], raw.get("sliding_window_pattern") or 6
    types = raw.get("layer_types") or [
        "sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)
    ]
    local = (raw.get("rope_parameters") or {}).get("sliding_attention") or {}
    return Traits(
        norms="both",
        norm_offset=1.0,
        qk_norm="head",
        activation="gelu_tanh",
        embedding_scale=raw["hidden_size"] ** 0.5,
        attention_scale=raw.get("query_pre_attn_scalar", 256) ** -0.5,
        window=raw.get("sliding_window") or 0,
        windowed=frozenset(i for i, kind in enumerate(types) if kind == "sliding_attention"),
        window_theta=float(local.get("rope_theta") or raw.get("rope_local_base_freq") or 10_000.0),
    )


FAMILIES: dict[str, Family] = {
    "Qwen3ForCausalLM": Family("qwen3", lambda _: Traits(qk_norm="head")),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", lambda _: Traits(qk_norm="head")),
    "Qwen2ForCausalLM": Family("qwen2", lambda _: Traits(qkv_bias=True)),
    "LlamaForCausalLM": Family("llama", lambda _: Traits()),
    "MistralForCausalLM": Family("mistral", lambda raw: Traits(**_window(raw))),
    "SmolLM3ForCausalLM": Family("smollm3", _smollm3, tied=True),
    "Phi3ForCausalLM": Family("phi3", _phi3),
    "Olmo2ForCausalLM": Family("olmo2", _olmo2),
    "Gemma3ForCausalLM": Family("gemma3", _gemma3, tied=True, activation="hidden_activation"),
}
"""Families by the architecture that config.json names."""
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
