"""The architecture of a model, read from config.json."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.engine.families import ACTIVATIONS, FAMILIES, Family, Traits
from lockstep.engine.numerics.block_shapes import Products, products
from lockstep.tokens.errors import CheckpointError

LONG_ROPES = ("longrope", "su")


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Rope:
    """Llama 3's scaling of rotary frequencies beyond the trained context length."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRope:
    """Phi's scaling of rotary frequencies, up to the context length of its training.

    Beyond it all positions would change at once, and every key with them.
    """

    factors: tuple[float, ...]
    attention_factor: float
    original_context: int

    @classmethod
    def of(cls, rope: dict[str, Any], raw: dict[str, Any]) -> LongRope:
        """Return the scaling that these rotary parameters describe."""
        field = "original_max_position_embeddings"
        original = rope.get(field) or raw[field]
        stretch = rope.get("factor") or raw["max_position_embeddings"] / original
        default = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
        return cls(
            factors=tuple(rope["short_factor"]),
            attention_factor=rope.get("attention_factor") or default,
            original_context=original,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The architecture of one model, read from its config.json."""

    family: str
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    rope_theta: float
    rope_factor: float
    """Divisor of all rotary frequencies (rope type linear)."""
    rope_llama3: Llama3Rope | None
    rope_long: LongRope | None
    max_position: int
    tied: bool
    traits: Traits
    eos_ids: frozenset[int]
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    normalize_top_k: bool = False
    moe_layers: tuple[int, ...] = ()

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def products(self) -> Products:
        """The matrix products of this model, which must not depend on the batch in exact mode."""
        return products(
            hidden=self.hidden,
            q_size=self.q_size,
            kv_size=self.kv_size,
            vocab=self.vocab_size,
            intermediate=self.intermediate if len(self.moe_layers) < self.layers else 0,
            experts=self.experts if self.moe_layers else 0,
            expert_intermediate=self.expert_intermediate if self.moe_layers else 0,
        )

    @classmethod
    def read(cls, directory: Path) -> ModelConfig:
        """Return the config in `directory`. Raises CheckpointError for unsupported features."""
        try:
            return cls.of(_read_json(directory / "config.json"), directory)
        except KeyError as error:
            raise CheckpointError(f"{directory / 'config.json'} has no {error}") from None

    @classmethod
    def of(cls, raw: dict[str, Any], directory: Path) -> ModelConfig:
        """Return the config with these fields. Raises as `read`.

        End-of-sequence ids are also read from generation_config.json in `directory`.
        """
        architecture = (raw.get("architectures") or [None])[0]
        family = FAMILIES.get(architecture)
        if family is None:
            raise CheckpointError(
                f"architecture {architecture!r} in {directory / 'config.json'} is not supported: "
                f"expected one of {', '.join(FAMILIES)}"
            )
        _reject_unsupported(raw, family)
        rope = _read_rope(raw)
        long = LongRope.of(rope, raw) if _rope_type(rope) in LONG_ROPES else None
        layers = raw["num_hidden_layers"]
        heads = raw["num_attention_heads"]
        moe = family.name == "qwen3_moe"
        return cls(
            family=family.name,
            vocab_size=raw["vocab_size"],
            hidden=raw["hidden_size"],
            layers=layers,
            heads=heads,
            kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            intermediate=raw["intermediate_size"],
            eps=raw["rms_norm_eps"],
            rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
            rope_factor=float(rope["factor"]) if _rope_type(rope) == "linear" else 1.0,
            rope_llama3=_read_llama3_rope(rope),
            rope_long=long,
            max_position=long.original_context if long else raw["max_position_embeddings"],
            tied=bool(raw.get("tie_word_embeddings", family.tied)),
            traits=family.traits(raw),
            eos_ids=_read_eos_ids(directory, raw),
            experts=(raw.get("num_experts") or raw["num_local_experts"]) if moe else 0,
            experts_per_token=raw["num_experts_per_tok"] if moe else 0,
            expert_intermediate=raw["moe_intermediate_size"] if moe else 0,
            normalize_top_k=bool(raw.get("norm_topk_prob", False)) if moe else False,
            moe_layers=tuple(
                layer
                for layer in range(layers if moe else 0)
                if layer not in (raw.get("mlp_only_layers") or ())
                and (layer + 1) % raw.get("decoder_sparse_step", 1) == 0
            ),
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist: not a model directory") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return raw


def _reject_unsupported(raw: dict[str, Any], family: Family) -> None:
    """Raise CheckpointError for a feature that this engine would compute incorrectly."""
    unsupported = {
        "attention_bias": family.name != "qwen2" and raw.get("attention_bias"),
        "mlp_bias": raw.get("mlp_bias"),
        "use_sliding_window": raw.get("use_sliding_window"),
        "quantization_config": raw.get("quantization_config"),
        family.activation: family.activation in raw
        and ACTIVATIONS.get(raw[family.activation]) != family.traits(raw).activation,
    }
    for field, present in unsupported.items():
        if present:
            raise CheckpointError(
                f"config.json sets {field} to {raw[field]!r}, which this engine does not support"
            )


def _read_rope(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters, of the layers without a window where each kind has its own."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    own = rope.get("full_attention", rope)
    return own if isinstance(own, dict) else {}


def _rope_type(rope: dict[str, Any]) -> Any:
    return rope.get("rope_type") or rope.get("type") or "default"


def _read_llama3_rope(rope: dict[str, Any]) -> Llama3Rope | None:
    kind = _rope_type(rope)
    if kind in ("default", "linear", *LONG_ROPES):
        return None
    if kind != "llama3":
        raise CheckpointError(
            f"rope type {kind!r} is not supported: expected default, linear, llama3 or longrope"
        )
    return Llama3Rope(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_context=rope["original_max_position_embeddings"],
    )


def _read_eos_ids(directory: Path, raw: dict[str, Any]) -> frozenset[int]:
    generation = directory / "generation_config.json"
    sources = [raw.get("eos_token_id")]
    if generation.exists():
        sources.append(_read_json(generation).get("eos_token_id"))
    ids: set[int] = set()
    for source in sources:
        ids.update([source] if isinstance(source, int) else source or ())
    return frozenset(ids)
