"""Conclusions from a worker's logprobs and digest, on numbers of the real engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from lockstep.engine import EngineOptions
from lockstep.engine.core import Core
from lockstep.engine.numerics.bf16 import make_bf16_safe
from lockstep.engine.probe import remember, write_probe
from lockstep.engine.weights.weights import Weights
from lockstep.fleet.update.judgement import UNKNOWN, Judgement, Witness, judge
from lockstep.fleet.update.proof import reference_of
from lockstep.models import bundled
from lockstep.storage.desired_state import Closeness, Reference
from tests.engine import checkpoints
from tests.fleet.weight_faults import FAULTS, Fault, Tensors, replaced, stepped

Rows = tuple[tuple[float, ...], ...]
STEP, LARGE_STEP = 0.03, 0.1
"""In standard deviations of each tensor. A layer in a step of 0.03 hides in the noise of 0.03 nats
between a trainer in float32 and a worker in bfloat16: only contents tell it."""
PAIRS = (("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16"))
"""Types of a trainer and of a worker that is not exact."""


@dataclass(frozen=True)
class Case:
    """A worker that held `old` and was sent `new`, and the trainer's probe of `new`."""

    core: Core
    old: Tensors
    new: Tensors
    right: Weights
    reference: Reference
    before: Rows
    dtype: str

    def scores(self, wrong: Tensors) -> Rows:
        weights = self.right.with_tensors(wrong.items(), "wrong") if wrong else self.right
        return scored(self.core, weights, self.reference.sequences)

    def judged(self, scores: Rows, **known: Any) -> Judgement:
        witness = Witness(before=self.before, dtype=self.dtype)
        return judge(scores, self.reference, replace(witness, **known))


def scored(core: Core, weights: Weights, sequences: Sequence[Sequence[int]]) -> Rows:
    return tuple(tuple(core.score(list(ids), weights=weights)) for ids in sequences)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("judged")


@cache
def case(
    model: str, trainer: str, worker: str, directory: Path, scale: float | None = None
) -> Case:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    make_bf16_safe()
    source = bundled(model)
    assert source is not None
    dtype = getattr(torch, trainer)
    scale = scale or (STEP if trainer == worker else LARGE_STEP)
    folder = directory / f"{model}-{trainer}-{worker}-{scale}"
    old = {name: t.to(dtype) for name, t in checkpoints.tensors_of(source).items()}
    new = stepped(old, scale)
    paths = [
        checkpoints.save(source, folder / "old", old),
        checkpoints.save(source, folder / "new", new),
    ]
    mine = AutoModelForCausalLM.from_pretrained(paths[0], dtype=dtype).eval()
    remember(mine)
    moved = AutoModelForCausalLM.from_pretrained(paths[1], dtype=dtype)
    mine.load_state_dict(moved.state_dict())
    reference = reference_of(write_probe(mine, folder))
    assert reference is not None
    options = EngineOptions(max_model_len=512, max_seqs=1, arithmetic="close", dtype=worker)
    core = Core(source, options)
    before = scored(core, core.served.load_weights(paths[0], "old"), reference.sequences)
    right = core.served.load_weights(paths[1], "new")
    return Case(core, old, new, right, reference, before, worker)


@pytest.mark.failure_mode("F48")
@pytest.mark.parametrize("model", ["tiny", "tiny-moe"])
@pytest.mark.parametrize(("trainer", "worker"), PAIRS)
def test_the_right_weights_are_accepted_by_their_scores_alone(
    model: str, trainer: str, worker: str, directory: Path
) -> None:
    trial = case(model, trainer, worker, directory)
    assert trial.reference.tolerance is None
    verdict = trial.judged(trial.scores({}))
    assert verdict.error is None
    assert verdict.evidence.decided_by == "scores"
    assert verdict.evidence.digest == "unknown"
    # Also with its digest, when nothing is known of how it followed before.
    alone = msgspec.structs.replace(trial.reference, previous=None)
    witness = Witness(before=trial.before, dtype=worker)
    assert judge(trial.scores({}), alone, replace(witness, contents="match")).error is None


@pytest.mark.failure_mode("F48")
@pytest.mark.parametrize("model", ["tiny", "tiny-moe"])
@pytest.mark.parametrize(("trainer", "worker"), PAIRS)
@pytest.mark.parametrize("fault", ["old weights kept", "one layer kept", "one tensor zeroed"])
def test_large_faults_are_caught_by_scores_even_when_the_digest_matches(
    model: str, trainer: str, worker: str, fault: Fault, directory: Path
) -> None:
    trial = case(model, trainer, worker, directory)
    scores = trial.scores(replaced(fault, trial.old, trial.new))
    verdict = trial.judged(scores, contents="match")
    assert verdict.error is not None, verdict


@pytest.mark.failure_mode("F48")
@pytest.mark.parametrize("model", ["tiny", "tiny-moe"])
@pytest.mark.parametrize("fault", FAULTS)
def test_in_float32_every_fault_is_caught_by_scores(
    model: str, fault: Fault, directory: Path
) -> None:
    trial = case(model, "float32", "float32", directory)
    scores = trial.scores(replaced(fault, trial.old, trial.new))
    assert trial.judged(scores, contents="match").error is not None


@pytest.mark.failure_mode("F48")
@pytest.mark.parametrize(("trainer", "worker"), PAIRS)
@pytest.mark.parametrize("fault", FAULTS)
def test_misread_weights_are_caught_by_their_digest_whatever_the_scores(
    trainer: str, worker: str, fault: Fault, directory: Path
) -> None:
    trial = case("tiny-moe", trainer, worker, directory)
    scores = trial.scores(replaced(fault, trial.old, trial.new))
    assert trial.judged(scores, contents="mismatch").error is not None
    right = trial.judged(trial.scores({}), contents="mismatch")
    assert right.error is not None
    assert right.evidence.decided_by == "digest"


@pytest.mark.failure_mode("F49")
def test_a_step_within_the_noise_is_accepted_only_by_its_digest(
    directory: Path,
) -> None:
    trial = case("tiny", "float32", "bfloat16", directory, 1e-4)
    verdict = trial.judged(trial.scores({}), contents="match")
    assert verdict.error is None
    assert verdict.evidence.decided_by == "digest"
    unknown = trial.judged(trial.scores({}))
    assert unknown.error is not None
    assert "nothing tells the new weights from the old" in unknown.error.message
    # A worker that kept the old ones says as much, and cannot tell that digest.
    kept = trial.judged(trial.before, contents="mismatch")
    assert kept.error is not None


@pytest.mark.failure_mode("F48")
def test_thousands_of_draws_of_right_and_stale_workers_are_told_apart() -> None:
    """The test itself: noise as measured in bf16, steps of three times that noise."""
    rng = np.random.default_rng(0)
    tokens, noise, trials = 1940, 0.03, 2000
    rejected = accepted = 0
    for _ in range(trials):
        new = -rng.exponential(6.0, tokens)
        old = np.minimum(new + rng.laplace(0.0, 3 * noise, tokens), 0.0)
        off = [rng.laplace(0.0, noise, tokens) for _ in range(2)]
        reference = Reference(
            ((0,) * (tokens + 1),), (tuple(new),), None, (tuple(old),), "bfloat16"
        )
        witness = Witness(before=(tuple(old + off[0]),), dtype="bfloat16")
        rejected += judge((tuple(new + off[1]),), reference, witness).error is not None
        accepted += judge((tuple(old + off[0]),), reference, witness).error is None
    assert (rejected, accepted) == (0, 0)


def flat(values: Sequence[float], **reference: Any) -> tuple[Rows, Reference]:
    rows = (tuple(values),)
    ids = ((0,) * (len(values) + 1),)
    return rows, Reference(ids, **{"logprobs": rows, "tolerance": None, **reference})


def test_bits_decide_only_where_they_tell_new_from_old() -> None:
    rows, reference = flat([-1.0, -2.0], tolerance=0.0)
    moved = ((-1.0, -2.5),)
    assert judge(rows, reference, Witness(before=moved)).evidence.decided_by == "bits"
    stale = judge(rows, reference, Witness(before=rows))
    assert stale.error is not None
    assert "nothing tells" in stale.error.message
    digest = judge(rows, reference, Witness("match", before=rows))
    assert (digest.error, digest.evidence.decided_by) == (None, "digest")
    assert judge(rows, reference, Witness(before=rows, same=True)).error is None
    assert judge(moved, reference, Witness("match")).error is not None


def test_an_explicit_tolerance_decides() -> None:
    _, reference = flat([-1.0] * 100, tolerance=0.25)
    near, far = ((-1.2,) * 100,), ((-1.3,) * 100,)
    verdict = judge(near, reference, Witness())
    assert (verdict.error, verdict.evidence.bound) == (None, 0.25)
    assert judge(far, reference, Witness()).error is not None
    # Old weights that clearly differ are rejected although they are within the tolerance.
    kept = judge(((-1.24,) * 100,), reference, Witness(before=((-1.24,) * 100,), dtype="float32"))
    assert kept.error is not None


@pytest.mark.parametrize("scores", [[], [[-1.0]], [[-1.0, math.nan]], [[-math.inf, -1.0]]])
def test_scores_that_are_not_logprobs_are_never_accepted(scores: list[list[float]]) -> None:
    _, reference = flat([-1.0, -1.0])
    assert judge(scores, reference, Witness("match", same=True)).error is not None


def test_noise_under_the_version_before_does_not_excuse_wrong_scores() -> None:
    """A worker that served other weights than the trainer assumes is not calibrated by them."""
    rng = np.random.default_rng(1)
    new = tuple(-rng.exponential(6.0, 1000))
    old = tuple(np.array(new) - 0.5)
    _, reference = flat(new, previous=(old,), dtype="bfloat16")
    other = (tuple(np.array(new) - 3.0),)
    off = (tuple(np.array(new) - 1.0),)
    verdict = judge(off, reference, Witness("match", before=other, dtype="bfloat16"))
    assert verdict.error is not None
    assert verdict.evidence.bound == UNKNOWN["bfloat16"].top
    seen = Witness("match", before=other, earlier=Closeness(0.02, 0.1), dtype="bfloat16")
    assert judge((new,), reference, seen).evidence.bound != UNKNOWN["bfloat16"].top
