"""The learner against a real engine: no mismatch with equal weights, else a visible one."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.checkpoint.manifest import PROBE
from lockstep.checkpoint.probe import Probe
from lockstep.tokens import Sample
from lockstep.tokens.errors import BadExperts, BadRequest, BadSupport, Conflict
from lockstep.tokens.grammar import Grammar
from lockstep.tokens.support import Support
from lockstep.train.config import LearnerConfig, TrainConfig
from lockstep.train.learning.learner import Learner
from tests.engine.rig import ids, sample_of
from tests.train.rollouts import batch, engine, relabelled, sampled

pytestmark = pytest.mark.exact_arithmetic
RESELECTED = TrainConfig(learner=LearnerConfig(support="reselected"))


def config(model: str = "tiny", **learner: Any) -> TrainConfig:
    return TrainConfig(model=model, learner=LearnerConfig(pass_tokens=64, **learner))


def learner(model: str = "tiny", **options: Any) -> Learner:
    return Learner(config(model, **options), exact=True)


def halved() -> Learner:
    """A learner with other weights than the engine's."""
    moved = learner()
    with torch.no_grad():
        for parameter in moved.model.parameters():
            parameter.mul_(0.5)
    return moved


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return sampled()


def test_equal_weights_have_no_mismatch_at_all(samples: list[Sample]) -> None:
    learnt = learner().step(batch(samples), 1)
    assert learnt.metrics["mismatch_kl"] == 0.0
    assert learnt.metrics["mismatch_max"] == 0.0
    assert learnt.metrics["is_masked"] == 0.0
    assert learnt.metrics["grad_norm"] > 0
    for sample, logprobs in zip(samples, learnt.logprobs, strict=True):
        assert len(logprobs) == len(sample.token_ids)
        pairs = zip(sample.logprobs, logprobs, sample.sampled_mask, strict=True)
        assert all(engine == trainer for engine, trainer, was in pairs if was)


@pytest.mark.failure_mode("F71")
@pytest.mark.failure_mode("F100")
@pytest.mark.parametrize("support", [True, False], ids=["recorded", "reselected"])
@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 0.9},
        {"top_k": 12, "min_p": 0.01},
        {"presence_penalty": 0.6, "frequency_penalty": 0.2, "repetition_penalty": 1.2},
        {"grammar": Grammar("regex", "[a-z ]{4,9}[.]"), "ignore_eos": False},
    ],
    ids=str,
)
def test_the_learner_applies_the_sampling_options_of_a_sample(
    options: dict[str, Any], support: bool
) -> None:
    shaped = sampled(support=support, **options)
    assert all(sample.shaping for sample in shaped)
    truncates = any(name in options for name in ("top_p", "top_k"))
    assert all(sample.support_lost == (truncates and not support) for sample in shaped)
    learnt = learner().step(batch(shaped, RESELECTED), 1)
    assert learnt.metrics["unequal_logprobs"] == 0
    assert learnt.metrics["mismatch_max"] == 0.0
    assert learnt.metrics["grad_norm"] > 0
    assert math.isfinite(learnt.metrics["entropy"])


def test_a_token_that_the_weights_cannot_draw_is_not_learnt_from() -> None:
    shaped = sampled(top_k=2)
    learnt = halved().step(batch(shaped, RESELECTED), 1)
    assert math.isfinite(learnt.metrics["loss"])
    assert math.isfinite(learnt.metrics["grad_norm"])


@pytest.mark.failure_mode("F100")
def test_other_weights_are_compared_over_the_recorded_sets() -> None:
    """Every token has a ratio, and it is that of the model's logits over the token's own set."""
    shaped = sampled(support=True, top_k=2)
    moved = halved()
    expected = []
    for sample in shaped:
        with torch.no_grad():
            logits = moved.model(torch.tensor([sample.token_ids])).logits[0].double()
        assert sample.support is not None
        for at, (token, was) in enumerate(zip(sample.token_ids, sample.sampled_mask, strict=True)):
            if was:
                own = sample.support.ids(at)
                assert own is not None
                row = logits[at - 1]
                expected.append(float(row[token] - row[torch.tensor(own.tolist())].logsumexp(0)))
    learnt = moved.step(batch(shaped), 1)
    pairs = [
        value
        for sample, logprobs in zip(shaped, learnt.logprobs, strict=True)
        for value, was in zip(logprobs, sample.sampled_mask, strict=True)
        if was
    ]
    assert pairs == pytest.approx(expected, abs=1e-5)
    assert learnt.metrics["compared_logprobs"] == len(expected)
    assert learnt.metrics["mismatch_max"] > 0.01


@pytest.mark.failure_mode("F100")
def test_ratios_over_recorded_sets_are_unbiased_when_the_weights_have_moved() -> None:
    """By enumeration of every draw of two tokens, out of a vocabulary of eight cut by top_p 0.6.

    Off policy, the mean ratio is 1, and a mean weighted by ratios is that of the moved weights over
    the same sets. Over the whole vocabulary neither holds.
    """
    rig, prompt = engine("tiny"), ids(1, 9)
    options = {"top_p": 0.6, "allowed_token_ids": tuple(range(40, 48)), "support": True}

    def draw(prefix: list[int]) -> tuple[Sample, list[int]]:
        sample = sample_of(rig.generate(prefix, max_tokens=1, seed=0, **options))
        assert sample.support is not None
        own = sample.support.ids(len(prefix))
        assert own is not None
        return sample, own.tolist()

    samples = []
    first, starts = draw(prompt)
    for start in starts:
        second, ends = draw([*prompt, start])
        sets = Support.placed([(9, Support.of_ids([starts, ends], 512))], 11)
        (span,) = second.shaping
        (version,) = second.versions
        samples += [
            replace(
                second, token_ids=[*prompt, start, end], sampled_mask=[False] * 9 + [True] * 2,
                logprobs=[0.0] * 9 + [-1.0] * 2, support=sets, shaping=(replace(span, start=9),),
                versions=(replace(version, start=9),),
            )
            for end in ends
        ]  # fmt: skip
    assert first.support_absent is False
    assert 4 < len(samples) < 64
    moved = halved()
    with torch.no_grad():
        rows = [moved.model(torch.tensor([s.token_ids])).logits[0, 8:10] for s in samples]
    whole = [
        float(row.double().log_softmax(-1).gather(1, torch.tensor(s.token_ids[9:])[:, None]).sum())
        for row, s in zip(rows, samples, strict=True)
    ]
    sampler, trainer = (
        [sum(own[9:]) for own in each.step(batch(samples), 1).logprobs]
        for each in (learner(), moved)
    )
    assert sum(map(math.exp, sampler)) == pytest.approx(1, abs=1e-5)
    draws = list(zip(sampler, trainer, samples, strict=True))
    assert max(abs(new - old) for old, new, _ in draws) > 0.1
    assert sum(math.exp(old) * math.exp(new - old) for old, new, _ in draws) == pytest.approx(1)

    def probability(row: Tensor, own: Sample) -> float:
        assert own.support is not None
        parts = []
        for at, logits in enumerate(row.double()):
            allowed = own.support.ids(9 + at)
            assert allowed is not None
            over = logits[torch.tensor(allowed.tolist())].logsumexp(0)
            parts.append(float(logits[own.token_ids[9 + at]] - over))
        return math.exp(sum(parts))

    weighted = sum(
        math.exp(old) * math.exp(new - old) * own.token_ids[-1] for old, new, own in draws
    )
    expected = sum(
        probability(row, own) * own.token_ids[-1] for row, own in zip(rows, samples, strict=True)
    )
    assert weighted == pytest.approx(expected, rel=1e-5)
    biased = sum(
        math.exp(old) * math.exp(new - old) for old, new in zip(sampler, whole, strict=True)
    )
    assert biased < 0.5


@pytest.mark.failure_mode("F100")
def test_truncated_samples_without_their_sets_are_an_error() -> None:
    shaped = sampled(top_p=0.9)
    with pytest.raises(BadSupport, match=r"top_p 0.9.*support: absent.*learner.support"):
        batch(shaped)
    assert batch(shaped, RESELECTED).learnt_tokens > 0


def test_one_changed_id_shows_in_the_mismatch(samples: list[Sample]) -> None:
    ids = list(samples[0].token_ids)
    ids[-3] = (ids[-3] + 1) % 500
    learnt = learner().step(batch([replace(samples[0], token_ids=ids), *samples[1:]]), 1)
    assert learnt.metrics["mismatch_kl"] > 0
    assert learnt.metrics["mismatch_max"] > 0.01


def test_one_shifted_logprob_shows_in_the_mismatch(samples: list[Sample]) -> None:
    logprobs = list(samples[0].logprobs)
    logprobs[-2] -= 0.125
    learnt = learner().step(batch([replace(samples[0], logprobs=logprobs), *samples[1:]]), 1)
    assert learnt.metrics["mismatch_max"] == pytest.approx(0.125, abs=1e-5)
    assert learnt.metrics["mismatch_kl"] > 0


def test_a_stale_label_shows_in_the_age_and_is_not_learnt_from(samples: list[Sample]) -> None:
    fresh = [relabelled(sample, "step-3") for sample in samples[1:]]
    stale = relabelled(samples[0], "step-1")
    assert batch([stale, *fresh], now=3, limit=2).off_policy_max == 2
    strict = batch([stale, *fresh], now=3, limit=0)
    assert (strict.dropped, strict.off_policy_max) == (1, 0)


def shifted(samples: list[Sample]) -> list[Sample]:
    """The samples as another sampler would have drawn them, with other logprobs."""
    return [
        replace(own, logprobs=[
            value + 0.7 * math.sin(3 * at) if was else 0.0
            for at, (value, was) in enumerate(zip(own.logprobs, own.sampled_mask, strict=True))
        ])
        for own in samples
    ]  # fmt: skip


@pytest.mark.failure_mode("F101")
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("rejected", ["count", "leave"])
def test_a_step_divides_by_the_tokens_that_count(
    samples: list[Sample], rejected: str, aggregation: str
) -> None:
    """Loss and gradient of a step in three passes, against the formula over all tokens at once."""
    loss = {
        "kind": "ppo", "rejected": rejected, "aggregation": aggregation,
        "corrections": [{"kind": "icepop", "low": 0.7, "high": 1.4}],
    }  # fmt: skip
    settings = TrainConfig.of({"model": "tiny", "loss": loss, "learner": {
        "pass_tokens": 16, "max_grad_norm": 1e9,
    }})  # fmt: skip
    made = batch(shifted(samples), settings)
    own = Learner(settings, exact=True)
    learnt = own.step(made, 1)

    other = Learner(settings, exact=True)
    total, kept_tokens, sums = 0, 0, []
    for item in made.items:
        row = other.model(torch.tensor([item.sample.token_ids])).logits[0].log_softmax(-1)
        at = [at for at, was in enumerate(item.sample.sampled_mask) if was]
        new = torch.stack([row[i - 1, item.sample.token_ids[i]] for i in at])
        rho = (new.detach() - torch.tensor([item.sample.logprobs[i] for i in at])).exp()
        kept = (rho >= 0.7) & (rho <= 1.4)
        values = -(rho * item.advantage * new)[kept]
        count = int(kept.sum()) if rejected == "leave" else len(at)
        total, kept_tokens = total + count, kept_tokens + int(kept.sum())
        sums.append(values.sum() / count if aggregation == "sequence" else values.sum())
    divisor = {"token": total, "sequence": len(sums), "constant": len(sums) * 48}[aggregation]
    (torch.stack(sums).sum() / divisor).backward()
    norm = sum(float(p.grad.double().square().sum()) for p in other.model.parameters()) ** 0.5
    assert learnt.metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    tokens = made.learnt_tokens
    assert 0 < kept_tokens < tokens
    counts = [learnt.metrics[name] for name in ("tokens_learnt", "tokens_kept")]
    assert counts == [tokens, kept_tokens]
    assert learnt.metrics["touched_token_icepop"] == tokens - kept_tokens


def held(weight: float = 1.0, **reference: Any) -> TrainConfig:
    """A run that is held to a reference, with steps that move the weights visibly."""
    return TrainConfig.of(
        {
            "learner": {"lr": 1e-3, "lora_rank": reference.pop("lora_rank", 0)},
            "reference": {"weight": weight, **reference},
        }
    )


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_frozen_reference_is_what_the_run_started_from(
    samples: list[Sample], lora_rank: int
) -> None:
    own = Learner(held(lora_rank=lora_rank), exact=True)
    first, second = (own.step(batch(samples), step).metrics["reference_kl"] for step in (1, 2))
    assert first == 0.0 < second


def test_a_heavier_penalty_keeps_the_policy_closer(samples: list[Sample]) -> None:
    light, heavy = Learner(held(1e-6), exact=True), Learner(held(1e3), exact=True)
    for step in (1, 2, 3):
        one, other = (own.step(batch(samples), step).metrics for own in (light, heavy))
    assert other["reference_kl"] < 0.5 * one["reference_kl"]


def test_a_moving_average_follows_and_survives_a_resume(
    samples: list[Sample], tmp_path: Path
) -> None:
    settings = held(kind="ema", decay=0.5)
    own, frozen = Learner(settings, exact=True), Learner(held(), exact=True)
    for step in (1, 2):
        own.step(batch(samples), step)
        frozen.step(batch(samples), step)
    own.save(tmp_path / "step-2", "step-2")
    torch.save(own.state(), tmp_path / "state.pt")
    again = Learner(settings, exact=True, weights=tmp_path / "step-2")
    again.load_state(torch.load(tmp_path / "state.pt", weights_only=True))
    following, resumed, still = (
        each.step(batch(samples), 3).metrics["reference_kl"] for each in (own, again, frozen)
    )
    assert following == resumed
    assert 0.0 < following < still


def test_nothing_to_learn_from_is_an_error(samples: list[Sample]) -> None:
    with pytest.raises(Conflict, match="step 4 has no token to learn from: 4 samples were dropped"):
        learner().step(batch(samples, now=3), 4)


def test_weights_and_state_give_the_same_next_step(samples: list[Sample], tmp_path: Path) -> None:
    first = learner()
    first.step(batch(samples), 1)
    first.save(tmp_path / "step-1", "step-1")
    torch.save(first.state(), tmp_path / "state.pt")
    again = Learner(config(), exact=True, weights=tmp_path / "step-1")
    again.load_state(torch.load(tmp_path / "state.pt", weights_only=True))
    for one in (first, again):
        one.step(batch(samples), 2)
    pairs = zip(first.model.parameters(), again.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("exact", [True, False])
def test_the_first_probe_has_the_logprobs_of_the_weights_before_it(
    samples: list[Sample], tmp_path: Path, exact: bool
) -> None:
    """They are the model's weights in a new run, and the checkpoint's in a resumed one."""
    first = Learner(config(), exact=exact)
    first.save(tmp_path / "step-0", "step-0")
    first.step(batch(samples), 1)
    first.save(tmp_path / "step-1", "step-1")
    resumed = Learner(config(), exact=exact, weights=tmp_path / "step-1")
    resumed.step(batch(samples), 2)
    resumed.save(tmp_path / "step-2", "step-2")
    zeroth, one, two = (Probe.read(tmp_path / f"step-{step}" / PROBE) for step in range(3))
    assert zeroth.previous == zeroth.logprobs
    assert (one.previous, two.previous) == (zeroth.logprobs, one.logprobs)
    assert len({zeroth.logprobs, one.logprobs, two.logprobs}) == 3


def test_an_unknown_lora_target_is_an_error_that_names_it() -> None:
    with pytest.raises(BadRequest, match=r"learner\.lora_targets is \['qproj'\]: .*not found"):
        learner(lora_rank=4, lora_targets=("qproj",))


def test_lora_trains_the_adapter_only_and_starts_without_a_mismatch(
    samples: list[Sample], tmp_path: Path
) -> None:
    made = learner(lora_rank=4)
    before = {n: p.detach().clone() for n, p in made.model.named_parameters()}
    learnt = made.step(batch(samples), 1)
    assert learnt.metrics["mismatch_kl"] == 0.0
    changed = [n for n, p in made.model.named_parameters() if not torch.equal(p, before[n])]
    assert changed
    assert all("lora_" in name for name in changed)
    made.save(tmp_path / "step-1", "step-1")
    names = {path.name for path in (tmp_path / "step-1").iterdir()}
    assert {
        "adapter_model.safetensors",
        "adapter_config.json",
        "probe.safetensors",
        "STABLE",
    } <= names


def biased(logits: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """Make the router prefer other experts, as other kernels may in a tie."""
    probs = torch.softmax(logits, dim=-1, dtype=torch.float)
    taste = torch.linspace(1.0, 1.5, probs.shape[-1])
    ids = torch.topk(probs * taste, k, dim=-1).indices
    weights = probs.gather(-1, ids)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype), ids


def test_replayed_experts_leave_no_mismatch_where_routers_disagree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = engine("tiny-moe")
    # After the self-test, which would find another router than the trainer's and fall back to close
    # arithmetic: its bits equal the trainer's on some makes of CPU only.
    monkeypatch.setattr("lockstep.engine.model.model.route", biased)
    samples = sampled(rig, experts_start=0)
    assert rig.core.plan.is_exact
    on = learner("tiny-moe", replay_experts=True).step(batch(samples), 1)
    assert on.metrics["mismatch_kl"] == 0.0
    off = learner("tiny-moe", replay_experts=False).step(batch(samples), 1)
    assert off.metrics["mismatch_kl"] > 0.0


def test_replay_changes_nothing_where_routers_agree() -> None:
    samples = sampled("tiny-moe", count=2, experts_start=0)
    for replay in (True, False):
        made = learner("tiny-moe", replay_experts=replay)
        assert made.step(batch(samples), 1).metrics["mismatch_kl"] == 0.0
        routers = [p for n, p in made.model.named_parameters() if n.endswith("gate.weight")]
        assert routers
        assert all(p.grad is not None and bool((p.grad != 0).any()) for p in routers)


def test_a_run_that_replays_experts_but_requests_none_is_refused_at_its_start() -> None:
    config = TrainConfig.of({"model": "tiny-moe", "rollout": {"experts": False}})
    with pytest.raises(BadRequest, match=r"rollout\.experts is false, but 'tiny-moe' is a mixture"):
        Learner(config, exact=False)


def test_samples_without_experts_cannot_be_replayed() -> None:
    with pytest.raises(BadExperts, match=r"set rollout\.experts to true"):
        learner("tiny-moe").step(batch(sampled("tiny-moe", count=2)), 1)


@pytest.mark.close_arithmetic("float16 on a CPU")
class TestFloat16:
    """float16: float32 copies of the weights, and a scale of the loss that adapts."""

    def half(self, **options: Any) -> Learner:
        return Learner(config(dtype="float16", **options), exact=False)

    def test_small_updates_add_up_although_the_weights_cannot_hold_them(
        self, samples: list[Sample]
    ) -> None:
        own = self.half(lr=1e-6)
        for step in (1, 2):
            learnt = own.step(batch(samples), step)
        exact = learner().step(batch(samples), 1)
        assert learnt.metrics["grad_norm"] == pytest.approx(exact.metrics["grad_norm"], rel=0.05)
        state = own.state()["optimizer"]
        pairs = zip(own.model.parameters(), state["copies"], strict=True)
        assert all(torch.equal(p, copy.half()) for p, copy in pairs)
        pairs = zip(own.model.parameters(), state["copies"], strict=True)
        assert any(not torch.equal(p.float(), copy) for p, copy in pairs)

    def test_an_overflow_halves_the_scale_and_repeats_the_pass(self, samples: list[Sample]) -> None:
        own, other = self.half(), self.half()
        own._optimizer.scale = 2.0**40
        learnt, expected = (each.step(batch(samples), 1) for each in (own, other))
        assert own._optimizer.scale < 2.0**32
        assert learnt.metrics["compared_logprobs"] == expected.metrics["compared_logprobs"]
        assert learnt.metrics["grad_norm"] == pytest.approx(expected.metrics["grad_norm"], rel=0.02)

    def test_copies_and_scale_survive_a_resume(self, samples: list[Sample], tmp_path: Path) -> None:
        own = self.half()
        own.step(batch(samples), 1)
        own.save(tmp_path / "step-1", "step-1")
        torch.save(own.state(), tmp_path / "state.pt")
        again = Learner(config(dtype="float16"), exact=False, weights=tmp_path / "step-1")
        again.load_state(torch.load(tmp_path / "state.pt", weights_only=True))
        for each in (own, again):
            each.step(batch(samples), 2)
        pairs = zip(
            own.state()["optimizer"]["copies"], again.state()["optimizer"]["copies"], strict=True
        )
        assert all(torch.equal(a, b) for a, b in pairs)
