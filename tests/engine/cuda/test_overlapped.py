"""Overlapped decoding gives what decoding step by step gives, whatever happens in between.

The kernels run by Triton's interpreter on the CPU; what is launched and collected apart on a GPU
is so here, though the device has no queue of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.engine.cuda import kernels
from lockstep.engine.cuda.graphs import Decoder, bucket
from lockstep.engine.cuda.overlapped import OverlappedDecoder
from lockstep.tokens import Completion
from lockstep.tokens.errors import BadLogprob
from tests.engine.rig import Rig, ids

SMALL = {"arithmetic": "close", "max_seqs": 3, "max_model_len": 64, "prefix_cache_bytes": 1 << 18}


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SPLIT_TARGET", 4)
    monkeypatch.setattr(kernels, "NARROW", 512)


def step_by_step(tiny: Path) -> Rig:
    return Rig(tiny, weight_version="v1", **SMALL)


@pytest.fixture
def rig(tiny: Path) -> Rig:
    """An engine with overlapped decoding, as it is on a GPU."""
    rig = step_by_step(tiny)
    core = rig.core
    decoder = Decoder(core.model, core.cache)
    core.overlapped = OverlappedDecoder(decoder, core.scheduler, "raw", core.take, core.wipe)
    return rig


def alike(ours: Completion, theirs: Completion) -> None:
    assert ours.token_ids == theirs.token_ids
    assert ours.logprobs == pytest.approx(theirs.logprobs, abs=2e-5)
    assert (ours.ranks, ours.finish) == (theirs.ranks, theirs.finish)


def in_flight(rig: Rig) -> bool:
    return rig.core.overlapped is not None and rig.core.overlapped.in_flight


def launch(rig: Rig) -> None:
    """Steps until a step is in flight."""
    while not in_flight(rig):
        rig.core.step()


def test_every_request_gets_the_tokens_it_gets_step_by_step(tiny: Path, rig: Rig) -> None:
    """Different ends free slots, which others move into; a later request waits for one."""
    options_of_each = [
        {"max_tokens": 5, "seed": 1},
        {"max_tokens": 2, "seed": 2, "temperature": 0.0},
        {"max_tokens": 6, "seed": 3, "temperature": 0.7, "logprob_mode": "processed"},
        {"max_tokens": 3, "seed": 4},
    ]
    other = step_by_step(tiny)
    pairs = [
        (rig.submit(ids(at, 4 + at), **options), other.submit(ids(at, 4 + at), **options))
        for at, options in enumerate(options_of_each)
    ]
    rig.run()
    other.run()
    for ours, theirs in pairs:
        alike(ours.one, theirs.one)
    assert rig.core.generated_tokens == other.core.generated_tokens
    assert rig.idle


def test_a_stop_token_ends_it_though_the_next_step_is_under_way(tiny: Path, rig: Rig) -> None:
    plain = step_by_step(tiny).generate(ids(1, 5), max_tokens=6)
    stop = plain.token_ids[2]
    others = rig.submit(ids(2, 5), max_tokens=6)
    completion = rig.submit(ids(1, 5), max_tokens=6, stop_token_ids=[stop])
    rig.run()
    assert completion.one.token_ids == plain.token_ids[: plain.token_ids.index(stop) + 1]
    assert completion.one.finish == "stop"
    alike(others.one, step_by_step(tiny).generate(ids(2, 5), max_tokens=6))


def test_what_the_kernels_do_not_know_goes_step_by_step(tiny: Path, rig: Rig) -> None:
    options = {"max_tokens": 3, "top_p": 0.5}
    result = rig.submit(ids(1, 5), **options)
    while not result.ended:
        rig.core.step()
        assert not in_flight(rig)
    assert result.one == step_by_step(tiny).generate(ids(1, 5), **options)


def test_an_end_that_is_banned_yet_does_not_come(tiny: Path, rig: Rig) -> None:
    plain = step_by_step(tiny).generate(ids(1, 5), max_tokens=4)
    stop = plain.token_ids[1]
    completion = rig.generate(ids(1, 5), max_tokens=4, stop_token_ids=[stop], min_tokens=3)
    assert stop not in completion.token_ids[:3]


def test_an_abort_keeps_the_token_that_was_in_flight(tiny: Path, rig: Rig) -> None:
    result = rig.submit(ids(1, 5), max_tokens=30, request_id="a")
    launch(rig)
    before = len(result.tokens_so_far)
    assert rig.core.abort("a") == 1
    assert result.one.finish == "abort"
    assert len(result.one.token_ids) == before + 1
    plain = step_by_step(tiny).generate(ids(1, 5), max_tokens=before + 1)
    assert result.one.token_ids == plain.token_ids


def test_a_swap_falls_between_two_tokens(tiny: Path, rig: Rig, tmp_path: Path) -> None:
    from tests.engine import checkpoints

    tensors = {name: each * 1.01 for name, each in checkpoints.tensors_of(tiny).items()}
    second = checkpoints.save(tiny, tmp_path, tensors)
    result = rig.submit(ids(1, 5), max_tokens=6)
    launch(rig)
    rig.load(second, "v2")
    assert not in_flight(rig)
    cut = len(result.tokens_so_far)
    rig.run()
    assert [(s.version, s.start, s.end) for s in result.one.versions] == [
        ("v1", 0, cut),
        ("v2", cut, 6),
    ]
    whole = result.one.prompt_ids + result.one.token_ids
    for logprobs, weights, span in (
        (checkpoints.reference(tiny, whole), tiny, slice(0, cut)),
        (checkpoints.reference(second, whole), second, slice(cut, 6)),
    ):
        assert result.one.logprobs[span] == pytest.approx(logprobs[4:][span], abs=1e-4), weights


def test_a_pause_hands_on_what_is_in_flight(rig: Rig) -> None:
    result = rig.submit(ids(1, 5), max_tokens=6, stream=True)
    launch(rig)
    before = len(result.pieces)
    assert rig.pause("keep") == [None]
    assert len(result.pieces) == before + 1
    assert not rig.core.has_work
    rig.core.resume()
    rig.run()
    assert len([piece for piece in result.pieces if piece.sampled]) == 6


def test_a_prefix_of_overlapped_decoding_is_there_for_the_next_turn(tiny: Path, rig: Rig) -> None:
    first = rig.generate(ids(1, 30), max_tokens=4)
    turn = [*first.prompt_ids, *first.token_ids, *ids(2, 4)]
    again = rig.generate(turn, max_tokens=3)
    assert rig.core.prefixes.hits >= 32
    alike(again, step_by_step(tiny).generate(turn, max_tokens=3))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.failure_mode("F15")
def test_a_row_that_breaks_fails_alone_and_leaves_nothing_behind(tiny: Path, rig: Rig) -> None:
    bad = rig.submit(ids(1, 20), max_tokens=4)
    good = rig.submit(ids(2, 20), max_tokens=4)
    launch(rig)
    slot = rig.core.scheduler.running.index(bad.handle.sequences[0])
    rig.core.cache.v[:, slot, :, 3] = float("nan")
    rig.run()
    assert isinstance(bad.error, BadLogprob)
    alike(good.one, step_by_step(tiny).generate(ids(2, 20), max_tokens=4))
    assert torch.isfinite(rig.core.cache.v).all()
    again = rig.generate(ids(1, 20), max_tokens=2)
    alike(again, step_by_step(tiny).generate(ids(1, 20), max_tokens=2))


def test_batch_sizes_are_few_and_large_enough() -> None:
    assert [bucket(n) for n in (1, 2, 3, 17, 32, 33, 256)] == [1, 2, 4, 32, 32, 64, 256]
