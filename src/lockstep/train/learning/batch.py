"""Training batches from rollouts: ages of tokens, samples that are dropped or masked, counts."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lockstep.protocol.common.request import GenerateRequest
from lockstep.tokens import Completion, Sample
from lockstep.tokens.errors import BadSupport, BadVersions, Conflict
from lockstep.train.config import TrainConfig
from lockstep.train.envs.environment import Reward, Task
from lockstep.train.learning.advantages import advantages

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RolloutDraw:
    """One request for one choice, with its seed, and the completion that was sampled for it."""

    request: GenerateRequest
    completion: Completion


@dataclass(frozen=True, slots=True)
class Rollout:
    """One rollout of a task: its reward, samples, prefix breaks and retries.

    `draws` are the requests of its last attempt; there are none for programs that send their own.
    """

    reward: Reward
    samples: tuple[Sample, ...]
    breaks: int = 0
    retries: int = 0
    draws: tuple[RolloutDraw, ...] = field(default=(), compare=False)

    @property
    def failed(self) -> bool:
        return self.reward.failure is not None

    def shaped_reward(self, max_tokens: int, overlong: int) -> float:
        """Return the reward less the penalty of a long turn.

        The penalty rises from 0 to 1 over the last `overlong` tokens before `max_tokens`.
        """
        if not overlong:
            return self.reward.value
        longest = max((_longest_turn(sample) for sample in self.samples), default=0)
        return self.reward.value - min(max(longest - (max_tokens - overlong), 0) / overlong, 1.0)


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """The rollouts of one task. Their rewards are compared with each other.

    The seeds of the rollouts were derived from `seeds`, for the record of the run.
    """

    rollouts: tuple[Rollout, ...]
    task: Task | None = None
    seeds: tuple[str | int, ...] = ()

    @property
    def varies(self) -> bool:
        """Whether the rollouts that did not fail have different rewards."""
        return len({own.reward.value for own in self.rollouts if not own.failed}) > 1


@dataclass(frozen=True, slots=True)
class TeacherTop:
    """The teacher's likeliest tokens in the place of each token of a sample, and their logprobs.

    Both have the shape (tokens, K), with zeros for the first token, which nothing predicts.
    """

    ids: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]

    @property
    def nbytes(self) -> int:
        """Bytes on the way from the teacher, with ids of 4 bytes."""
        return 8 * self.ids.size


@dataclass(frozen=True, slots=True)
class TrainItem:
    """One sample to learn from. `learn_T` is true for the tokens that count.

    `teacher` are the teacher's logprobs of the tokens, and `teacher_top` its likeliest tokens.
    """

    sample: Sample
    advantage: float
    learn_T: Bools
    reward: float
    teacher: list[float] | None = None
    teacher_top: TeacherTop | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """The samples that a step learns from, and counts of what was left out."""

    items: tuple[TrainItem, ...]
    rewards: tuple[float, ...]
    solved: float
    tokens: int
    off_policy: float
    off_policy_max: int
    mixed: int
    aborts: int
    dropped: int
    breaks: int
    retries: int
    uniform: int = 0
    """Groups that were left out because all of their rewards are equal (loss.resample)."""

    @property
    def learnt_tokens(self) -> int:
        return sum(int(item.learn_T.sum()) for item in self.items)


@dataclass(slots=True)
class Clock:
    """The update step of each version label. Labels themselves have no order."""

    steps: dict[str, int] = field(default_factory=dict)

    def tick(self, label: str, step: int) -> None:
        self.steps[label] = step

    def skip(self) -> None:
        """Count a step without an update: no version becomes older by it."""
        self.steps = {label: step + 1 for label, step in self.steps.items()}

    def step_of(self, label: str) -> int:
        """Return the step of a label. Raises BadVersions for one that this run never published."""
        if label not in self.steps:
            last = ", ".join(list(self.steps)[-3:]) or "none"
            raise BadVersions(
                f"a token was sampled under version {label!r}, which this run has not published "
                f"(its last versions: {last}): another trainer updates this fleet, or the fleet "
                "lost its weights"
            )
        return self.steps[label]


def make_batch(
    groups: Sequence[RolloutGroup], clock: Clock, now: int, config: TrainConfig, max_off_policy: int
) -> TrainBatch:
    """Return the batch of `groups` as of update `now`.

    Raises Conflict for a sample whose logprobs do not match the config, BadSupport for one of
    truncated distributions whose supports were not recorded, and BadVersions for one of
    weights that are not this run's.
    """
    items: list[TrainItem] = []
    lags: list[npt.NDArray[np.int64]] = []
    mixed = aborts = dropped = 0
    plan = config.loss_plan
    varied = [group for group in groups if group.varies] if plan.resamples else []
    learnt = varied or list(groups)  # without any difference, the step learns nothing from rewards
    # The reward of a failed rollout must not move the baseline of its group.
    valid = [[rollout for rollout in group.rollouts if not rollout.failed] for group in learnt]
    dropped += sum(len(r.samples) for group in groups for r in group.rollouts if r.failed)
    limit = config.rollout.max_tokens
    rewards = [[r.shaped_reward(limit, plan.overlong) for r in group] for group in valid]
    for group, values in zip(valid, advantages(rewards, plan.baseline), strict=True):
        for rollout, advantage in zip(group, values, strict=True):
            for sample in rollout.samples:
                check_mode(sample, config)
                check_support(sample, config)
                mask = np.asarray(sample.sampled_mask, dtype=bool)
                lag_T = version_lags(sample, clock, now)
                labels = {span.version for span in sample.versions}
                mixed += len(labels) > 1
                aborts += sample.aborts
                stale = bool((lag_T[mask] > max_off_policy).any())
                rejected = (sample.aborts > 0 and config.loop.aborted == "drop") or (
                    len(labels) > 1 and config.loop.mixed == "drop"
                )
                if stale or rejected or not mask.any():
                    dropped += 1
                    continue
                # "mask" learns only from the tokens of the newest version in the sample.
                if len(labels) > 1 and config.loop.mixed == "mask":
                    mask &= lag_T == lag_T[mask].min()
                lags.append(lag_T[mask])
                items.append(TrainItem(sample, advantage, mask, rollout.reward.value))
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lags_N = np.concatenate(lags) if lags else np.zeros(0, dtype=np.int64)
    return TrainBatch(
        items=tuple(items),
        rewards=tuple(rollout.reward.value for rollout in rollouts),
        solved=sum(rollout.reward.solved for rollout in rollouts) / max(len(rollouts), 1),
        tokens=sum(sum(sample.sampled_mask) for rollout in rollouts for sample in rollout.samples),
        off_policy=float(lags_N.mean()) if lags_N.size else 0.0,
        off_policy_max=int(lags_N.max()) if lags_N.size else 0,
        mixed=mixed,
        aborts=aborts,
        dropped=dropped,
        breaks=sum(rollout.breaks for rollout in rollouts),
        retries=sum(rollout.retries for rollout in rollouts),
        uniform=len(groups) - len(learnt),
    )


def failures(groups: Sequence[RolloutGroup]) -> dict[str, int]:
    """Return how many rollouts failed, by cause."""
    causes = [rollout.reward.failure for group in groups for rollout in group.rollouts]
    return dict(Counter(cause for cause in causes if cause is not None))


def is_stale(group: RolloutGroup, clock: Clock, now: int, max_off_policy: int) -> bool:
    """Whether the group has samples, but all of them are too old to learn from."""
    samples = [sample for rollout in group.rollouts for sample in rollout.samples]
    return bool(samples) and all(
        bool((version_lags(sample, clock, now) > max_off_policy).any()) for sample in samples
    )


def check_mode(sample: Sample, config: TrainConfig) -> None:
    """Raise Conflict unless the sample's logprobs have the config's mode and temperature."""
    settings: Mapping[str, object] = {
        "logprob_mode": config.rollout.logprobs,
        "temperature": config.rollout.temperature,
    }
    for name, expected in settings.items():
        if (value := getattr(sample, name)) != expected:
            raise Conflict(
                f"a sample has {name} {value!r}, but [rollout] has {expected!r}: the ratios would "
                "mean nothing; set [rollout] to what the server uses, or the other way round",
                param=name,
            )


def check_support(sample: Sample, config: TrainConfig) -> None:
    """Raise BadSupport for tokens of a truncated distribution whose supports are not known."""
    if config.learner.support == "recorded" and sample.support_lost:
        options = next(span.shaping for span in sample.shaping if span.shaping.truncates).changes
        workers = ", ".join(sample.workers) or "the server"
        raise BadSupport(
            f"tokens were drawn with {options}, but {workers} did not record the sets they were "
            "drawn from (support: absent), so that every ratio would be biased: sample without "
            "truncation, use workers that record the sets (Lockstep's do; vLLM with "
            "--return-sampling-mask and a top_k), or accept the bias with learner.support = "
            '"reselected"',
            param="learner.support",
        )


def _longest_turn(sample: Sample) -> int:
    """Return the length of the longest run of sampled tokens."""
    runs = itertools.groupby(sample.sampled_mask)
    return max((sum(1 for _ in run) for sampled, run in runs if sampled), default=0)


def version_lags(sample: Sample, clock: Clock, now: int) -> npt.NDArray[np.int64]:
    """Return how many updates ago each token was sampled (T,); 0 for tokens of the prompt."""
    lag_T = np.zeros(len(sample.token_ids), dtype=np.int64)
    for span in sample.versions:
        lag_T[span.start : span.end] = now - clock.step_of(span.version)
    return lag_T
