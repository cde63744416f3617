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
from lockstep.fleet.update.judgement import (
    UNKNOWN,
    Judgement,
    Witness,
    check_requirement,
    judge,
)
from lockstep.fleet.update.proof import reference_of
from lockstep.models import bundled
from lockstep.protocol.control.read_back import Difference, ReadBack, merge_ranks
from lockstep.storage.desired_state import Closeness, Reference
from tests.engine import checkpoints
from tests.fleet.weight_faults import FAULTS, Fault, Tensors, replaced, stepped

Rows = tuple[tuple[float, ...], ...]
STEP, LARGE_STEP = 0.03, 0.1
"""In standard deviations of each tensor. A layer in a step of 0.03 hides in the noise of 0.03 nats
between a trainer in float32 and a worker in bfloat16: only contents tell it."""
PAIRS = (("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16"))
"""Types of a trainer and of a worker that is not exact."""

IN_MEMORY: Any = {"contents": "match", "in_memory": True}
"""The digest of a worker that hashes the memory it computes with, as Lockstep's engine does."""
HELD = ReadBack({"a": (6, 0), "b": (4, 0)})


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
    assert judge(trial.scores({}), alone, replace(witness, **IN_MEMORY)).error is None


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
    verdict = trial.judged(trial.scores({}), **IN_MEMORY)
    assert verdict.error is None
    assert verdict.evidence.decided_by == "digest"
    only_read = trial.judged(trial.scores({}), contents="match")
    assert only_read.error is not None
    assert "its digest is of what it read, and it cannot read" in only_read.error.message
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
    digest = judge(rows, reference, Witness(before=rows, **IN_MEMORY))
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


@pytest.mark.failure_mode("F49")
def test_held_weights_decide_however_small_the_step() -> None:
    rows, reference = flat([-1.0] * 100, dtype="bfloat16", previous=((-1.0001,) * 100,))
    right = judge(rows, reference, Witness("match", HELD, before=rows, dtype="bfloat16"))
    assert (right.error, right.evidence.decided_by, right.evidence.held) == (None, "held", "match")
    assert right.evidence.scope == "held weights: 10 elements read back, all as given"
    stale = msgspec.structs.replace(
        HELD, tensors={"a": (6, 0), "b": (4, 1)}, first=Difference("b", (1, 0), 0.5, 0.25)
    )
    wrong = judge(rows, reference, Witness("match", stale, before=rows, dtype="bfloat16"))
    assert (wrong.evidence.decided_by, wrong.evidence.held) == ("held", "mismatch")
    assert wrong.error is not None
    assert wrong.error.message == (
        "it computes with other weights than it was given: 1 of 10 elements differ from the "
        "checkpoint, in tensor 'b'; the first: b[1, 0] is 0.5, expected 0.25"
    )


@pytest.mark.failure_mode("F49")
def test_scores_inside_the_noise_are_refused_unless_all_is_read_back() -> None:
    rows, reference = flat([-1.0] * 100, dtype="bfloat16", previous=((-1.0001,) * 100,))
    part = msgspec.structs.replace(HELD, unread={"c": "quantised: Fp8LinearMethod"})
    for held, gap in (
        (None, "its digest is of what it read, and it cannot read its weights back"),
        (part, "not read back: tensor 'c' (quantised: Fp8LinearMethod)"),
    ):
        witness = Witness("match", held, before=rows, dtype="bfloat16")
        verdict = judge(rows, reference, witness)
        assert verdict.error is not None
        assert gap in verdict.error.message
        refused = check_requirement("held", witness)
        assert refused is not None
        assert f"--require-proof held is set, and this worker shows less: {gap}" in refused.message
        assert "behaviour only, noise 0.001: smaller updates are not proved" in str(
            verdict.evidence.scope
        )
    for shown in (Witness("match", HELD), Witness(**IN_MEMORY)):
        assert check_requirement("held", shown) is None


@pytest.mark.failure_mode("F48")
def test_the_bound_follows_from_the_noise_and_not_from_the_step() -> None:
    """Stale norms, as measured in float32: 0.0743 off after a step of 3.8, with noise of 8.6e-6."""
    rng = np.random.default_rng(2)
    new = -rng.exponential(6.0, 1000)
    old = tuple(new - 3.78)
    _, reference = flat(tuple(new), previous=(old,), dtype="float32")
    before = (tuple(np.array(old) + 8.6e-6),)
    off = np.zeros(1000)
    off[7] = 0.0743
    stale = judge((tuple(new + off),), reference, Witness(before=before, dtype="float32"))
    assert stale.error is not None
    assert stale.evidence.bound == pytest.approx(1e-4)
    right = judge((tuple(new + 8.6e-6),), reference, Witness(before=before, dtype="float32"))
    assert right.error is None


def test_ranks_together_must_read_every_tensor() -> None:
    sizes = {"a": 8, "layer 1": 8}
    first = ReadBack({"a": (4, 0)}, absent=("layer 1",), sizes=sizes, seconds=0.1)
    second = ReadBack({"a": (4, 2), "layer 1": (8, 0)}, Difference("a", (0,), 1, 2), seconds=0.3)
    both = merge_ranks([first, second])
    assert (both.tensors, both.first) == ({"a": (8, 2), "layer 1": (8, 0)}, second.first)
    assert (both.is_complete, both.seconds) == (True, 0.3)
    alone = merge_ranks([first])
    assert alone.unread == {
        "a": "4 of 8 elements read back",
        "layer 1": "0 of 8 elements read back",
    }
    assert not alone.is_complete
    assert not ReadBack().is_complete
