"""The training configuration is read strictly: errors name the field and its value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.training.run_config import parse_changes
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
        ({"rollout": {"samples_shown": -1}}, r"rollout\.samples_shown is -1: expected 0 or more"),
        ({"learner": {"max_grad_norm": -1.0}}, r"max_grad_norm is -1\.0: expected more than 0"),
        ({"learner": {"max_grad_norm": 0}}, r"max_grad_norm is 0.*: expected more than 0"),
        ({"learner": {"lr": float("nan")}}, r"learner\.lr is nan: expected more than 0"),
        ({"learner": {"warmup_steps": -5}}, r"learner\.warmup_steps is -5: expected 0 or more"),
        ({"learner": {"betas": [1.5, 2.0]}}, r"betas is \(1\.5, 2\.0\): expected 0 or more and l"),
        ({"learner": {"weight_decay": -1}}, r"learner\.weight_decay is -1.*: expected 0 or more"),
        ({"learner": {"lora_rank": -4}}, r"learner\.lora_rank is -4: expected 0 or more"),
        ({"learner": {"lora_alpha": 0}}, r"learner\.lora_alpha is 0: expected 1 or more"),
        ({"learner": {"device": "gpu"}}, r"learner\.device is 'gpu': expected cpu, cuda or cuda:N"),
        ({"loss": {"mask_low": 0.5}}, r"loss\.mask_low is not a.*: set loss\.options\.mask_low"),
        ({"loss": {"options": {"kl": -1}}}, r"loss\.options\.kl is -1: expected 0 or more"),
        ({"loss": {"length": 8}}, r"loss\.length is 8, but loss\.aggregation is 'token'"),
        ({"loss": {"overlong": 64}}, r"loss\.overlong is 64, but rollout\.max_tokens is 48"),
        (
            {"loss": {"kind": "distill", "baseline": "batch"}},
            r"loss\.baseline is 'batch', but loss\.kind 'distill' learns from a teacher",
        ),
        (
            {"loss": {"corrections": [{"kind": "mask", "high": -1.0}]}},
            r"loss\.corrections\[0\]\.high is -1\.0: expected more than 0",
        ),
        (
            {"loss": {"corrections": [{"kind": "mask", "hi": 1.0}]}},
            r"loss\.corrections\[0\]\.hi is not a known field: expected one of kind, level",
        ),
        (
            {"loss": {"corrections": [{"kind": "cap"}]}},
            r"loss\.corrections\[0\]\.kind is 'cap': expected one of 'tis', 'mis'",
        ),
        (
            {"loss": {"kind": "grpo", "corrections": [{"kind": "tis", "level": "geometric"}]}},
            r"loss\.corrections\[0\]\.level is 'geometric': tis has token, sequence",
        ),
        (
            {"loss": {"kind": "grpo", "corrections": [{"kind": "mis", "high": 0.5}]}},
            r"loss\.corrections\[0\] has the range 0 to 0\.5: expected one that contains 1",
        ),
        (
            {"loss": {"corrections": [{"kind": "tis"}]}},
            r"loss\.corrections\[0\]\.kind is 'tis', but loss\.kind 'dppo' bounds the distance",
        ),
        (
            {"loss": {"kind": "sft", "corrections": [{"kind": "tis"}]}},
            r"loss\.corrections\[0\]\.kind is 'tis', but loss\.kind 'sft' takes its tokens as",
        ),
        (
            {"loss": {"kind": "grpo", "corrections": [{"kind": "tis"}, {"kind": "icepop"}]}},
            r"loss\.corrections\[1\]\.kind is 'icepop', but loss\.corrections\[0\] multiplies",
        ),
        (
            {"loss": {"corrections": [{"kind": "mask"}, {"kind": "mask"}]}},
            r"loss\.corrections\[1\]\.kind is 'mask', but loss\.corrections\[0\] is of this kind",
        ),
        ({"eval": {"prompts": -2}}, r"eval\.prompts is -2: expected 0 or more"),
        ({"seed": 10**400}, r"seed is 1000+: expected 0 or more and less than 9\.22337e\+18"),
        ({"rollout": {"group_size": 1}}, r"rollout\.group_size is 1: expected 2 or more"),
        ({"loop": {"mode": "both"}}, r"loop\.mode is 'both': expected one of 'sync', 'async'"),
        ({"learner": {"betas": [0.9]}}, r"learner\.betas is \[0\.9\]: expected a list of 2"),
        ({"learner": {"lora_targets": [1]}}, r"learner\.lora_targets\[0\] is 1: expected str"),
        (
            {"rollout": {"temperature": 0.7, "logprobs": "raw"}},
            r"rollout\.logprobs is 'raw': expected 'processed'",
        ),
        (
            {"rollout": {"top_p": 1.5}},
            r"rollout\.top_p is 1\.5: expected more than 0 and at most 1",
        ),
        ({"rollout": {"top_k": -1}}, r"rollout\.top_k is -1: expected 0 or more"),
        (
            {"rollout": {"top_k": 20, "logprobs": "raw"}},
            r"rollout\.logprobs is 'raw': expected 'processed' with rollout\.top_p, top_k or min_p",
        ),
        ({"loss": {"kind": "jsd"}}, r"teacher\.url is '': expected the URL of a teacher"),
        (
            {"loss": {"kind": "jsd", "options": {"beta": 1.0}}, "teacher": {"path": "tiny"}},
            r"loss\.options\.beta is 1\.0: expected a number above 0 and below 1",
        ),
        (
            {"loss": {"kind": "distill"}, "teacher": {"path": "tiny"}},
            r"teacher\.path is 'tiny': expected nothing, as loss\.kind is 'distill'",
        ),
        (
            {"loss": {"kind": "jsd"}, "teacher": {"path": "tiny", "url": "http://x"}},
            r"teacher\.url is 'http://x': expected nothing, as teacher\.path is 'tiny'",
        ),
        (
            {"loss": {"kind": "jsd"}, "teacher": {"path": "tiny"}, "rollout": {"top_p": 0.9}},
            r"loss\.kind is 'jsd': expected another, as rollout\.top_p",
        ),
        ({"loss": {"kind": "distill"}}, r"teacher\.url is '': expected the URL of a teacher"),
        ({"loss": {"kind": "gpro"}}, r"loss\.kind is 'gpro': expected one of dppo, ipo, grpo"),
        (
            {"loss": {"kind": "ppo", "options": {"kl": 1}}},
            r"loss\.options\.kl is 1: the options of",
        ),
        ({"loss": {"kind": "dro"}}, r"loss\.options\.beta is missing: dro has no default"),
        ({"learner": {"lr_min": 1e-5}}, r"learner\.lr_min is 1e-05: expected 0, as learner\.sched"),
        (
            {"learner": {"schedule": "linear", "lr_min": 1.0}},
            r"learner\.lr_min is 1\.0: expected at most learner\.lr, which is 0\.0001",
        ),
        ({"learner": {"decay_steps": 9}}, r"learner\.decay_steps is 9: expected nothing, as"),
        (
            {"learner": {"schedule": "cosine", "warmup_steps": 30}},
            r"learner\.warmup_steps is 30: expected less than 30, the step at which",
        ),
        (
            {"learner": {"lora_rank": 4}, "reference": {"kind": "ema"}},
            r"reference\.kind is 'ema': expected 'frozen', as learner\.lora_rank is 4",
        ),
        ({"reference": {"decay": 0.9}}, r"reference\.decay is 0\.9: expected nothing, as"),
        ({"learner": {"micro_batch": 3}}, r"micro_batch is not a.*: set learner\.pass_tokens"),
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


def test_only_fields_that_decide_what_is_learnt_count_as_differences() -> None:
    started = TrainConfig.of({"seed": 3, "sinks": ["jsonl", "wandb"]})
    now = started.with_changes({"learner.lr": 2e-4, "loop.steps": 90, "rollout.concurrency": 1})
    assert now.differences(json.loads(json.dumps(started.to_dict()))) == {
        "learner.lr": (1e-4, 2e-4)
    }
    # Tokens of synchronous runs have no age; experts that are replayed are always required.
    unused = started.with_changes({"loop.max_off_policy": 1, "rollout.experts": False})
    assert unused.differences(json.loads(json.dumps(started.to_dict()))) == {}
    falling = started.with_changes({"learner.schedule": "linear"})
    later = falling.with_changes({"loop.steps": 90})
    assert later.differences(json.loads(json.dumps(falling.to_dict()))) == {"loop.steps": (30, 90)}
    with pytest.raises(BadRequest, match=r"learner\.rate is not a field of the configuration"):
        started.with_changes({"learner.rate": 1.0})


def test_changes_on_the_command_line_are_toml_or_text() -> None:
    changes = parse_changes(["learner.lr=1e-5", "env.name=calc", "learner.betas=[0.9, 0.99]"])
    assert changes == {"learner.lr": 1e-5, "env.name": "calc", "learner.betas": [0.9, 0.99]}
    with pytest.raises(BadRequest, match="--change seed: expected FIELD=VALUE"):
        parse_changes(["seed"])
