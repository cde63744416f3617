"""What is not named: healthy differences, and differences that nothing tried explains."""

from __future__ import annotations

import random
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

import lockstep
from lockstep.tokens import Sample
from lockstep.tokens.errors import BadRequest
from tests.engine import checkpoints
from tests.explain.collection import clean_runs, scene_of
from tests.explain.scene import Scene, relabel, verdict_of

pytestmark = pytest.mark.close_arithmetic(
    "the reference of an explanation is close where this machine is; its band allows for that"
)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return scene_of("tiny", tmp_path_factory.mktemp("scene"))


@pytest.fixture(scope="module")
def samples(scene: Scene) -> list[Sample]:
    return scene.rollout(count=3)


def disturbed(samples: list[Sample], size: float) -> list[Sample]:
    """Return samples whose logprobs have noise that no cause explains."""
    rng = random.Random(1)
    return [
        replace(
            sample,
            logprobs=[
                min(-1e-9, number + size * rng.gauss(0, 1)) if sampled else 0.0
                for number, sampled in zip(sample.logprobs, sample.sampled_mask, strict=True)
            ],
        )
        for sample in samples
    ]


def test_clean_runs_of_several_dtypes_and_batches_are_healthy(tmp_path: Path) -> None:
    for name, verdict in clean_runs(6, tmp_path):
        assert verdict.outcome == "healthy", f"{name}: " + "\n".join(verdict.lines())
        assert not verdict.causes


@pytest.mark.failure_mode("F78")
def test_a_difference_of_unknown_cause_is_not_explained(
    scene: Scene, samples: list[Sample]
) -> None:
    verdict = verdict_of(scene.case(disturbed(samples, 0.05)))
    assert verdict.outcome == "not explained"
    assert verdict.causes == ()
    assert "Not explained" in verdict.sentence
    assert len(verdict.tried) > 50


@pytest.mark.failure_mode("F78")
def test_a_fault_beside_unknown_noise_is_not_named(scene: Scene, samples: list[Sample]) -> None:
    """Temperature explains half of the difference: that is not the cause of all of it."""
    stale = relabel(samples, temperature=1.2)
    verdict = verdict_of(scene.case(disturbed(stale, 0.05)), budget=40)
    assert verdict.causes == ()


def test_a_broken_tensor_is_not_blamed_on_old_weights(scene: Scene, tmp_path: Path) -> None:
    tensors = checkpoints.tensors_of(scene.new)
    tensors["model.layers.0.mlp.up_proj.weight"] = (
        tensors["model.layers.0.mlp.up_proj.weight"] * 1.1
    )
    served = replace(scene)
    served.served = checkpoints.save(scene.new, tmp_path / "broken", tensors)
    verdict = verdict_of(scene.case(served.rollout(count=2)), budget=60)
    assert verdict.cause not in ("old_weights", "old_tensors", "stale_kv")


def test_a_bundle_has_no_notes_and_repeats_the_verdict(
    scene: Scene, samples: list[Sample], tmp_path: Path
) -> None:
    secret = relabel(samples, temperature=1.3, notes=({"user": "s3cret"},), workers=("10.1.2.3",))
    path = tmp_path / "out.zip"
    verdict = lockstep.explain(secret, scene.new, others=[scene.old], bundle=path)
    # Raw logprobs are those at temperature 1: the numbers alone cannot tell which it was.
    assert verdict.cause == "raw_processed"
    assert verdict.causes[0].ties == ("temperature (temperature 1)",)
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
        archive.extract("samples.jsonl", tmp_path)
    whole = b"".join(contents.values())
    assert not any(word in whole for word in (b"s3cret", b"10.1.2.3", str(tmp_path).encode()))
    again = lockstep.explain(tmp_path / "samples.jsonl", scene.new, others=[scene.old])
    assert again.sentence == verdict.sentence


def test_results_are_stored_and_found_again(
    scene: Scene, samples: list[Sample], tmp_path: Path
) -> None:
    first = lockstep.explain(samples, scene.new, others=[], resume=tmp_path / "memo")
    again = lockstep.explain(samples, scene.new, others=[], resume=tmp_path / "memo")
    assert first.passes > 0
    assert again.passes == 0
    assert again.sentence == first.sentence


def test_numbers_and_samples_that_do_not_fit_are_rejected(
    scene: Scene, samples: list[Sample]
) -> None:
    with pytest.raises(BadRequest, match="trainer has 2 logprobs"):
        lockstep.explain(samples, scene.new, trainer=[-1.0, -2.0])
    with pytest.raises(BadRequest, match="no sampled token"):
        lockstep.explain([], scene.new)
    with pytest.raises(BadRequest, match="vocabulary"):
        lockstep.explain([replace(samples[0], token_ids=[9999] * len(samples[0].token_ids),
                                  support=None)], scene.new)  # fmt: skip
    with pytest.raises(BadRequest, match="module:function"):
        lockstep.explain(samples, scene.new, trainer="nowhere:nothing")
