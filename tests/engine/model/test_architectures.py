"""Comparison of every supported architecture, in unusual shapes, with transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from lockstep.engine import ModelConfig, exact
from lockstep.tokens.errors import CheckpointError
from tests.engine.checkpoints import ALL_LINEAR, edit_json, peft_model, reference
from tests.engine.rig import Rig, ids

COMMON: dict[str, Any] = {"num_hidden_layers": 2, "max_position_embeddings": 2048}


def qwen2() -> PretrainedConfig:
    return Qwen2Config(
        vocab_size=97, hidden_size=48, intermediate_size=100, num_attention_heads=6,
        num_key_value_heads=2, tie_word_embeddings=True, eos_token_id=1, **COMMON,
    )  # fmt: skip


def llama3() -> PretrainedConfig:
    stretched = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0,
                 "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                 "original_max_position_embeddings": 128}  # fmt: skip
    return LlamaConfig(
        vocab_size=131, hidden_size=64, intermediate_size=96, num_attention_heads=4,
        num_key_value_heads=1, tie_word_embeddings=False, eos_token_id=[1, 2],
        rope_parameters=stretched, **COMMON,
    )  # fmt: skip


def qwen3() -> PretrainedConfig:
    return Qwen3Config(
        vocab_size=77, hidden_size=40, intermediate_size=72, num_attention_heads=3,
        num_key_value_heads=3, head_dim=16, tie_word_embeddings=False, **COMMON,
    )  # fmt: skip


def qwen3_moe() -> PretrainedConfig:
    """Return a config without experts in layer 0, with unnormalised shares and 3 of 5 experts."""
    return Qwen3MoeConfig(
        vocab_size=77, hidden_size=40, intermediate_size=72, moe_intermediate_size=24,
        num_experts=5, num_experts_per_tok=3, norm_topk_prob=False, mlp_only_layers=[0],
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=False,
        **COMMON,
    )  # fmt: skip


def mistral() -> PretrainedConfig:
    """Return a config whose queries see 100 keys, less than a prompt has."""
    return MistralConfig(
        vocab_size=91, hidden_size=48, intermediate_size=80, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=100, tie_word_embeddings=False,
        **COMMON,
    )  # fmt: skip


def smollm3() -> PretrainedConfig:
    """Return a config whose second layer has no rotary position embedding."""
    return SmolLM3Config(
        vocab_size=83, hidden_size=48, intermediate_size=80, num_attention_heads=4,
        num_key_value_heads=2, no_rope_layer_interval=2, tie_word_embeddings=True,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, use_sliding_window=False, **COMMON,
    )  # fmt: skip


def olmo2() -> PretrainedConfig:
    return Olmo2Config(
        vocab_size=79, hidden_size=48, intermediate_size=80, num_attention_heads=6,
        num_key_value_heads=3, tie_word_embeddings=False, eos_token_id=1, pad_token_id=0, **COMMON,
    )  # fmt: skip


def gemma3() -> PretrainedConfig:
    """Return a config with a window of 100 keys in two of three layers."""
    return Gemma3TextConfig(
        vocab_size=101, hidden_size=48, intermediate_size=80, num_attention_heads=4,
        num_key_value_heads=2, head_dim=24, query_pre_attn_scalar=20, sliding_window=100,
        sliding_window_pattern=3, num_hidden_layers=3, max_position_embeddings=2048,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )  # fmt: skip


def phi3() -> PretrainedConfig:
    """Return a config with fused projections that rotates 12 of 16 values of each head."""
    return Phi3Config(
        vocab_size=89, hidden_size=48, intermediate_size=84, num_attention_heads=3,
        num_key_value_heads=1, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1,
        original_max_position_embeddings=1024,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [4.0] * 6,
            "original_max_position_embeddings": 1024,
        },
        **COMMON,
    )  # fmt: skip


ARCHITECTURES = [qwen2, llama3, qwen3, qwen3_moe, mistral, smollm3, olmo2, gemma3, phi3]


def write(config: PretrainedConfig, directory: Path) -> Path:
    """Write a random model in many shards."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory, max_shard_size="40KB")
    return directory


@pytest.mark.exact_arithmetic
@pytest.mark.parametrize("make", ARCHITECTURES)
def test_a_random_model_has_the_logprobs_of_transformers(
    make: Callable[[], PretrainedConfig], tmp_path: Path
) -> None:
    directory = write(make(), tmp_path)
    assert len(list(directory.glob("*.safetensors"))) > 2
    rig = Rig(directory, arithmetic="exact", max_batch_tokens=64)
    results = [
        rig.submit(ids(i, length, vocab=77), prompt_logprobs=0, max_tokens=25)
        for i, length in enumerate((700, 3, 65, 128))
    ]
    rig.run()
    for result in results:
        completion = result.one
        whole = completion.prompt_ids + completion.token_ids
        expected = reference(directory, whole)
        assert [e.logprob for e in completion.prompt_logprobs or [] if e] == expected[:-25]
        assert completion.logprobs == expected[-25:]
        assert rig.core.score(whole) == expected


@pytest.mark.exact_arithmetic
@pytest.mark.parametrize("make", [olmo2, gemma3, phi3])
def test_adapters_of_every_layout_have_the_logprobs_of_peft(
    make: Callable[[], PretrainedConfig], tmp_path: Path
) -> None:
    directory = write(make(), tmp_path / "base")
    modules = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj") if make is phi3 else ALL_LINEAR
    model = peft_model(directory, modules=modules)
    model.save_pretrained(tmp_path / "adapter")
    rig = Rig(directory, arithmetic="exact", max_batch_tokens=64)
    rig.adopt("a", tmp_path / "adapter")
    completion = rig.generate(ids(1, 150, vocab=77), adapter="a", max_tokens=20)
    with torch.no_grad():
        logprobs = exact.token_logprobs(
            exact.prepare(model), completion.prompt_ids + completion.token_ids
        )
    assert isinstance(logprobs, torch.Tensor)
    assert completion.logprobs == logprobs.tolist()[-20:]


@pytest.mark.parametrize("make", ARCHITECTURES)
def test_a_random_model_is_close_to_a_model_that_was_not_prepared(
    make: Callable[[], PretrainedConfig], tmp_path: Path
) -> None:
    """The exact comparison above replaces transformers' attention and activation by ours."""
    directory = write(make(), tmp_path)
    tokens = ids(5, 300, vocab=77)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        logprobs = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
    assert Rig(directory, arithmetic="close").core.score(tokens) == pytest.approx(
        expected, abs=1e-4
    )


def test_llama_rope_scaling_changes_these_logprobs(tmp_path: Path) -> None:
    """Otherwise the parity above would not show that the scaling is right."""
    directory = write(llama3(), tmp_path)
    stretched = Rig(directory).core.score(ids(1, 300, vocab=77))
    edit_json(directory / "config.json", rope_parameters={"rope_theta": 500000.0})
    assert Rig(directory).core.score(ids(1, 300, vocab=77)) != stretched


def test_end_tokens_are_read_from_both_configs(tmp_path: Path) -> None:
    directory = write(llama3(), tmp_path)
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    assert ModelConfig.read(directory).eos_ids == {1, 2, 5}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None}, "is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    ],
)
def test_an_unsupported_feature_is_rejected(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    qwen3().save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", **({"architectures": ["Qwen3ForCausalLM"]} | changes))
    with pytest.raises(CheckpointError, match=says):
        ModelConfig.read(tmp_path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not JSON"),
        ("[1]", "does not hold a JSON object"),
        ('{"architectures": ["LlamaForCausalLM"]}', "num_hidden_layers"),
    ],
)
def test_an_invalid_config_is_rejected(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=says):
        ModelConfig.read(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        ModelConfig.read(tmp_path / "nowhere")
