"""What a learner's step costs when shared prefixes are computed once, beside separate passes.

    python -m benchmarks.shared_prefixes [--rounds 3]

Both are steps of one learner in exact mode: the tree packs what samples share, and separate passes
take one sample each. The logprobs of all sampled tokens must be equal, bit for bit.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from benchmarks import table
from benchmarks.measure import in_turns
from benchmarks.table import Row
from lockstep.tokens import Sample, VersionSpan
from lockstep.train.config import LearnerConfig, TrainConfig
from lockstep.train.learning.batch import TrainBatch, TrainItem
from lockstep.train.learning.learner import Learner

PROMPT, ANSWER, TURN = 2048, 128, 256
Branch = list[tuple[list[int], bool]]
"""Runs of tokens, and whether each was sampled in this branch for the first time."""


def group(size: int) -> list[Branch]:
    draws = random.Random(size)
    prompt = tokens(draws, PROMPT)
    lengths = [draws.randrange(ANSWER // 2, ANSWER * 3 // 2) for _ in range(size)]
    return [[(prompt, False), (tokens(draws, length), True)] for length in lengths]


def session() -> list[Branch]:
    """A main line of six turns, each of whose first five starts a sub-agent of two turns."""
    draws = random.Random(0)
    main: Branch = [(tokens(draws, PROMPT // 2), False)]
    branches: list[Branch] = []
    for _ in range(5):
        main += [(tokens(draws, ANSWER), True), (tokens(draws, TURN), False)]
        before = [(ids, False) for ids, _ in main]
        for _ in range(2):
            before += [(tokens(draws, TURN // 4), False), (tokens(draws, ANSWER), False)]
            branches.append([*before[:-1], (before[-1][0], True)])
    return [[*main, (tokens(draws, ANSWER), True)], *branches]


def tokens(draws: random.Random, length: int) -> list[int]:
    return [draws.randrange(512) for _ in range(length)]


def batch(branches: Sequence[Branch]) -> TrainBatch:
    items = []
    for at, branch in enumerate(branches):
        ids = [token for run, _ in branch for token in run]
        mask = [sampled for run, sampled in branch for _ in run]
        spans, start = [], 0
        for run, sampled in branch:
            if sampled:
                spans.append(VersionSpan("v", start, start + len(run)))
            start += len(run)
        logprobs = [-6.0 if sampled else 0.0 for sampled in mask]
        sample = Sample(
            token_ids=ids, sampled_mask=mask, logprobs=logprobs, versions=tuple(spans),
            logprob_mode="processed",
        )  # fmt: skip
        items.append(TrainItem(sample, (-1.0) ** at, sample.numpy()["sampled_mask"], 0.0))
    return TrainBatch(
        items=tuple(items), rewards=(), solved=0.0, tokens=0, off_policy=0.0, off_policy_max=0,
        mixed=0, aborts=0, dropped=0, breaks=0, retries=0,
    )  # fmt: skip


class Contestant:
    """A learner that counts the tokens that its model computes."""

    def __init__(self, made: TrainBatch, pass_tokens: int) -> None:
        config = TrainConfig(learner=LearnerConfig(pass_tokens=pass_tokens, lr=1e-12))
        self.learner = Learner(config, exact=True)
        self.batch = made
        self.computed = 0
        self.logprobs: list[list[float]] = []
        self.learner.model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, _: object, __: object, arguments: dict[str, object]) -> None:
        self.computed += arguments["input_ids"].numel()  # type: ignore[attr-defined]

    def step(self) -> float:
        """Take a step and return its CPU seconds."""
        self.computed, before = 0, time.process_time()
        self.logprobs = self.learner.step(self.batch, 1).logprobs
        return time.process_time() - before


def rows(rounds: int) -> list[Row]:
    measured = []
    for name, branches in (
        ("group of 8, 2k prompt", group(8)),
        ("group of 32, 2k prompt", group(32)),
        ("session with 5 sub-agents", session()),
    ):
        made = batch(branches)
        tree, separate = Contestant(made, 8192), Contestant(made, 1)
        seconds = in_turns({"tree": tree.step, "separate": separate.step}, rounds)
        if tree.logprobs != separate.logprobs:
            raise SystemExit(f"{name}: the logprobs of the tree differ from those of each sample")
        lengths = sorted(sum(len(run) for run, _ in branch) for branch in branches)
        note = f"{len(branches)} samples of {lengths[0]:,} to {lengths[-1]:,} tokens"
        measured += [
            Row(
                what=f"{name}: tokens computed", against="separate passes", ours=tree.computed,
                theirs=separate.computed, unit="tokens", at_most=0.5, note=note,
            ),
            Row(
                what=f"{name}: forward, backward and optimizer", against="separate passes",
                ours=seconds["tree"], theirs=seconds["separate"], unit="s CPU", at_most=1 / 1.5,
                note=note,
                headline="learner step with shared prefixes" if len(branches) == 8 else "",
            ),
        ]  # fmt: skip
    return measured


if __name__ == "__main__":
    table.main(rows, __doc__, rounds=3)
