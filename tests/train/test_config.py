"""The training configuration is read strictly: errors name the field and its value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.tokens.errors import BadRequest
from lockstep.train.config import TrainConfig

EXAMPLE = Path(__file__).parents[2] / "examples" / "reverse.toml"


def test_the_example_is_a_valid_configuration() -> None:
    config = TrainConfig.read(EXAMPLE)
    assert (config.env.name, config.rollout.groups, config.learner.lr) == ("reverse", 16, 1e-4)
    assert TrainConfig.of(config.to_dict()) == config


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"sed": 1}, "sed is not a known field: expected one of model, run_dir, seed"),
        ({"rollout": {"group": 1}}, r"rollout\.group is not a known field"),
        ({"rollout": 3}, "rollout is 3: expected a table"),
        ({"rollout": {"groups": "16"}}, r"rollout\.groups is '16': expected int"),
        ({"rollout": {"groups": True}}, r"rollout\.groups is True: expected int"),
        ({"rollout": {"groups": 0}}, r"rollout\.groups is 0: expected 1 or more"),
        ({"rollout": {"group_size": 1}}, r"rollout\.group_size is 1: expected 2 or more"),
        ({"loop": {"mode": "both"}}, r"loop\.mode is 'both': expected one of 'sync', 'async'"),
        ({"learner": {"betas": [0.9]}}, r"learner\.betas is \[0\.9\]: expected a list of 2"),
        ({"learner": {"lora_targets": [1]}}, r"learner\.lora_targets\[0\] is 1: expected str"),
        (
            {"rollout": {"temperature": 0.7, "logprobs": "raw"}},
            r"rollout\.logprobs is 'raw': expected 'processed'",
        ),
        ({"loss": {"kind": "distill"}}, r"teacher\.url is '': expected the URL of a teacher"),
        ({"loss": {"kind": "gpro"}}, r"loss\.kind is 'gpro': expected one of grpo, distill, cross"),
        ({"loss": {"kind": "ppo", "kl": 1.0}}, r"loss\.kl is 1\.0, but loss\.kind 'ppo' has no"),
        ({"loss": {"kind": "dro"}}, r"loss\.options\.beta is missing: dro has no default"),
        ({"loss": {"options": {"kl": 1.0}}}, r"loss\.options\.kl is 1\.0: set loss\.kl instead"),
        ({"learner": {"exact": "yes"}}, r"learner\.exact is 'yes': expected true or false"),
        ({"sinks": ["x"]}, r"sinks\[0\] is 'x': expected one of 'jsonl', 'wandb'"),
    ],
)
def test_a_wrong_field_is_an_error_with_its_name_and_value(
    raw: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadRequest, match=message):
        TrainConfig.of(raw)


def test_a_file_that_is_missing_or_not_toml_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="cannot be read"):
        TrainConfig.read(tmp_path / "absent.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("model = ")
    with pytest.raises(BadRequest, match="is not TOML"):
        TrainConfig.read(broken)


def test_secrets_are_replaced_in_the_recorded_configuration() -> None:
    plain = TrainConfig.of({"serve": {"admin_token": "hush", "api_key": "hush"}}).to_dict()
    assert "hush" not in str(plain)
