"""Finite weights that compute NaN: their requests fail, and nothing else is affected."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.tokens.errors import BadLogprob
from tests.engine import checkpoints
from tests.engine.rig import Rig, ids


@pytest.fixture(scope="module")
def overflowing(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete, finite checkpoint that loads, but overflows in the first layer."""
    tensors = checkpoints.tensors_of(tiny)
    tensors["model.layers.0.self_attn.v_proj.weight"] *= 1e37
    tensors["model.layers.0.input_layernorm.weight"] *= 1e4
    return checkpoints.save(tiny, tmp_path_factory.mktemp("overflowing"), tensors)


@pytest.fixture
def rig(tiny: Path) -> Rig:
    return Rig(tiny, weight_version="good", max_seqs=3, max_batch_tokens=32)


@pytest.mark.failure_mode("F15")
def test_a_request_fails_and_names_the_version(rig: Rig, overflowing: Path) -> None:
    rig.load(overflowing, "bad")
    results = [rig.submit(ids(i, 10 + 50 * i), n=3) for i in range(3)]
    rig.run()
    for result in results:
        assert isinstance(result.error, BadLogprob)
        assert "'bad'" in str(result.error)
        assert len(result.events) == 1
    assert rig.idle


@pytest.mark.exact_arithmetic
def test_its_slots_are_clean_for_the_next_request(rig: Rig, tiny: Path, overflowing: Path) -> None:
    rig.load(overflowing, "bad")
    for i in range(3):
        rig.submit(ids(i, 200), n=2)
    rig.run()
    rig.core.rollback()
    results = [rig.submit(ids(i, 20)) for i in range(3)]
    rig.run()
    for result in results:
        whole = result.one.prompt_ids + result.one.token_ids
        assert result.one.logprobs == checkpoints.reference(tiny, whole)[-8:]


@pytest.mark.exact_arithmetic
def test_a_request_dropped_midway_leaves_no_trace(rig: Rig, tiny: Path, overflowing: Path) -> None:
    rig.load(overflowing, "bad")
    result = rig.submit(ids(1, 200))
    rig.run(1)
    rig.core.drop(result.handle)
    rig.core.rollback()
    completion = rig.generate(ids(2, 20))
    assert (
        completion.logprobs
        == checkpoints.reference(tiny, completion.prompt_ids + completion.token_ids)[-8:]
    )


@pytest.mark.exact_arithmetic
def test_scoring_it_is_an_error_and_does_not_spoil_later_scores(
    rig: Rig, tiny: Path, overflowing: Path
) -> None:
    bad = rig.core.served.load_weights(overflowing, "bad")
    with pytest.raises(BadLogprob, match="'bad'"):
        rig.core.score(ids(1, 100), weights=bad)
    assert rig.core.score(ids(2, 20)) == checkpoints.reference(tiny, ids(2, 20))


@pytest.mark.exact_arithmetic
def test_the_good_requests_of_a_step_survive_the_bad_ones(
    tiny: Path, tmp_path: Path, rig: Rig
) -> None:
    """An adapter overflows; base requests in the same batch are not affected."""
    from safetensors.torch import load_file, save_file

    checkpoints.adapter(tiny, tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    save_file({k: t * 1e25 for k, t in tensors.items()}, tmp_path / "adapter_model.safetensors")
    rig.adopt("bad", tmp_path)
    bad = rig.submit(ids(1, 60), adapter="bad")
    fine = [rig.submit(ids(i, 20 + i), max_tokens=12) for i in (2, 3)]
    rig.run()
    assert isinstance(bad.error, BadLogprob)
    for result in fine:
        whole = result.one.prompt_ids + result.one.token_ids
        assert result.one.logprobs == checkpoints.reference(tiny, whole)[-12:]
