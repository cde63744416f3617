"""Makes a training batch of rollouts: ages of tokens, what is dropped or masked, and counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lockstep.tokens import Sample
from lockstep.tokens.errors import BadVersions, Conflict
from lockstep.train.config import TrainConfig
from lockstep.train.envs.environment import Reward
from lockstep.train.learning.loss import advantages

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Rollout:
    """One played task: its reward, the samples of its conversations, and what went wrong."""

    reward: Reward
    samples: tuple[Sample, ...]
    breaks: int = 0
    retries: int = 0


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """The rollouts of one task, which are compared with each other."""

    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True)
class TrainItem:
    """One sample to learn from; `learn_T` is true for the tokens that count."""

    sample: Sample
    advantage: float
    learn_T: Bools
    reward: float
    teacher: list[float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """What a step learns from, and the counts that say what it does not."""

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

    @property
    def learnt_tokens(self) -> int:
        return sum(int(item.learn_T.sum()) for item in self.items)


@dataclass(slots=True)
class Clock:
    """Which update each version label stands for: labels are opaque, their order is the fleet's."""

    steps: dict[str, int] = field(default_factory=dict)

    def tick(self, label: str, step: int) -> None:
        self.steps[label] = step

    def skip(self) -> None:
        """A step passed without an update: no version is older than before."""
        self.steps = {label: step + 1 for label, step in self.steps.items()}

    def step_of(self, label: str) -> int:
        """Raises BadVersions for a label that this run never published."""
        if label not in self.steps:
            known = ", ".join(list(self.steps)[-3:]) or "none"
            raise BadVersions(
                f"a token was sampled under version {label!r}, which this run has not published "
                f"(its last are {known}): somebody else updates this fleet, or it lost its weights"
            )
        return self.steps[label]


def make_batch(
    groups: Sequence[RolloutGroup], clock: Clock, now: int, config: TrainConfig, max_off_policy: int
) -> TrainBatch:
    """The items of `groups` as of update `now`.

    Raises Conflict for a sample whose logprobs were made otherwise than the config says, and
    BadVersions for one of weights that are not this run's.
    """
    items: list[TrainItem] = []
    lags: list[npt.NDArray[np.int64]] = []
    mixed = aborts = dropped = 0
    for group in groups:
        # A rollout that failed says nothing about how well the others of its group did.
        whole = [rollout for rollout in group.rollouts if rollout.reward.failure is None]
        dropped += sum(len(each.samples) for each in group.rollouts if each.reward.failure)
        rewards = [rollout.reward.value for rollout in whole]
        shares = advantages(rewards, normalize_std=config.loss.normalize_std)
        for rollout, advantage in zip(whole, shares, strict=True):
            for sample in rollout.samples:
                check_mode(sample, config)
                mask = np.asarray(sample.sampled_mask, dtype=bool)
                lag_T = version_lags(sample, clock, now)
                labels = {span.version for span in sample.versions}
                mixed += len(labels) > 1
                aborts += sample.aborts
                stale = bool((lag_T[mask] > max_off_policy).any())
                refused = (sample.aborts > 0 and config.loop.aborted == "drop") or (
                    len(labels) > 1 and config.loop.mixed == "drop"
                )
                if stale or refused or not mask.any():
                    dropped += 1
                    continue
                if len(labels) > 1 and config.loop.mixed == "mask":
                    mask &= lag_T == lag_T[mask].min()
                lags.append(lag_T[mask])
                items.append(TrainItem(sample, advantage, mask, rollout.reward.value))
    every = [rollout for group in groups for rollout in group.rollouts]
    joined = np.concatenate(lags) if lags else np.zeros(0, dtype=np.int64)
    return TrainBatch(
        items=tuple(items),
        rewards=tuple(rollout.reward.value for rollout in every),
        solved=sum(rollout.reward.solved for rollout in every) / max(len(every), 1),
        tokens=sum(sum(sample.sampled_mask) for one in every for sample in one.samples),
        off_policy=float(joined.mean()) if joined.size else 0.0,
        off_policy_max=int(joined.max()) if joined.size else 0,
        mixed=mixed,
        aborts=aborts,
        dropped=dropped,
        breaks=sum(rollout.breaks for rollout in every),
        retries=sum(rollout.retries for rollout in every),
    )


def failures(groups: Sequence[RolloutGroup]) -> dict[str, int]:
    """How many rollouts failed, by cause."""
    causes = [rollout.reward.failure for group in groups for rollout in group.rollouts]
    return dict(Counter(cause for cause in causes if cause is not None))


def is_stale(group: RolloutGroup, clock: Clock, now: int, max_off_policy: int) -> bool:
    """Whether the group has samples, and none is young enough to be learnt from."""
    samples = [sample for rollout in group.rollouts for sample in rollout.samples]
    return bool(samples) and all(
        bool((version_lags(sample, clock, now) > max_off_policy).any()) for sample in samples
    )


def check_mode(sample: Sample, config: TrainConfig) -> None:
    """Raises Conflict unless the sample's logprobs are of the config's mode and temperature."""
    wanted: Mapping[str, object] = {
        "logprob_mode": config.rollout.logprobs,
        "temperature": config.rollout.temperature,
    }
    for name, expected in wanted.items():
        if (value := getattr(sample, name)) != expected:
            raise Conflict(
                f"a sample has {name} {value!r}, but this run learns from {expected!r}: their "
                "ratios would mean nothing; set [rollout] to what the server does, or the other "
                "way round",
                param=name,
            )


def version_lags(sample: Sample, clock: Clock, now: int) -> npt.NDArray[np.int64]:
    """How many updates ago each token was sampled, (tokens,); 0 where nothing was sampled."""
    lag_T = np.zeros(len(sample.token_ids), dtype=np.int64)
    for span in sample.versions:
        lag_T[span.start : span.end] = now - clock.step_of(span.version)
    return lag_T
