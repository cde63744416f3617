"""Overlapped decoding gives the same results as decoding step by step, whatever happens in between.

The kernels run in Triton's interpreter on the CPU. Steps are launched and collected separately, as
on a GPU, although the device has no queue.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from lockstep.engine.cuda import prefill, start
from lockstep.engine.cuda.graphs import Decoder, GraphPool
from lockstep.engine.cuda.kernels import close_kernels, prefill_kernels, single_row
from lockstep.engine.cuda.overlapped import OverlappedRunner
from lockstep.engine.cuda.prefill import Prefiller, token_sizes
from lockstep.engine.cuda.start import warm
from lockstep.engine.cuda.table import bucket
from lockstep.engine.model.arithmetic import ExactOnDevice
from lockstep.tokens import Completion, Ranked
from lockstep.tokens.errors import BadLogprob, EngineFailure
from tests.engine.rig import Rig, ids

SMALL = {
    "arithmetic": "close",
    "max_seqs": 3,
    "max_model_len": 64,
    "max_batch_tokens": 64,
    "prefix_cache_bytes": 1 << 18,
}


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(close_kernels, "SPLIT_TARGET", 4)
    monkeypatch.setattr(close_kernels, "NARROW", 512)
    monkeypatch.setattr(single_row, "NARROW", 512)
    monkeypatch.setattr(prefill, "SMALLEST", 8)
    monkeypatch.setattr(prefill, "SPARE_BLOCKS", 3)
    monkeypatch.setattr(prefill_kernels, "ROWS", 32)
    monkeypatch.setattr(start, "WARM_UP_SAMPLING", start.WARM_UP_SAMPLING[:1])
    monkeypatch.setattr(start, "WARM_UP_TOKENS", 5)


pytestmark = [
    # The interpreter computes rows that pad a batch as well, and warns of what comes of them.
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
]


def step_by_step(tiny: Path) -> Rig:
    return Rig(tiny, weight_version="v1", **SMALL)


@pytest.fixture
def rig(tiny: Path) -> Rig:
    """An engine with overlapped decoding, as on a GPU."""
    rig = step_by_step(tiny)
    core = rig.core
    decoder = Decoder(core.model, core.cache, GraphPool())
    core.model.prefiller = prefiller = Prefiller(core.model, core.cache, GraphPool(), 64)
    core.overlapped = OverlappedRunner(
        decoder, prefiller, core.scheduler, core.runner, core.take, core.wipe
    )
    core.served._in_place = True
    return rig


def alike(ours: Completion, theirs: Completion) -> None:
    assert ours.token_ids == theirs.token_ids
    assert ours.logprobs == pytest.approx(theirs.logprobs, abs=2e-5)
    assert (ours.ranks, ours.finish) == (theirs.ranks, theirs.finish)


def in_flight(rig: Rig) -> bool:
    return rig.core.overlapped is not None and rig.core.overlapped.in_flight


def launch(rig: Rig) -> None:
    """Step until a step is in flight in which all requests decode."""
    while not in_flight(rig) or any(each.generated == 0 for each in rig.core.scheduler.running):
        rig.core.step()


def test_every_request_gets_the_tokens_it_gets_step_by_step(tiny: Path, rig: Rig) -> None:
    """Requests of different lengths free slots that others move into; a later request waits for
    one."""
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


def test_a_stop_token_ends_a_request_whose_next_step_is_in_flight(tiny: Path, rig: Rig) -> None:
    plain = step_by_step(tiny).generate(ids(1, 5), max_tokens=6)
    stop = plain.token_ids[2]
    others = rig.submit(ids(2, 5), max_tokens=6)
    completion = rig.submit(ids(1, 5), max_tokens=6, stop_token_ids=[stop])
    rig.run()
    assert completion.one.token_ids == plain.token_ids[: plain.token_ids.index(stop) + 1]
    assert completion.one.finish == "stop"
    alike(others.one, step_by_step(tiny).generate(ids(2, 5), max_tokens=6))


OPTIONS: list[dict[str, Any]] = [
    {"top_p": 0.5},
    {"logprobs": 3, "temperature": 0.6},
    {},
    {"top_k": 3, "temperature": 0.7, "logprobs": 2},
    {"logprobs": 3, "temperature": 0.6, "logprob_mode": "raw"},
    {"frequency_penalty": 1.5, "temperature": 0.0},
    {"logit_bias": {5: 40.0}, "logprobs": 1},
    {"prompt_logprobs": 1},
    {"min_tokens": 2},
]


def test_every_option_stays_in_the_graphs(tiny: Path, rig: Rig) -> None:
    """Three requests at a time, so that rows sampled by the kernels are next to rows that are
    not."""
    other = step_by_step(tiny)
    pairs = [
        (
            rig.submit(ids(at, 3 + at % 3), max_tokens=2, **options),
            other.submit(ids(at, 3 + at % 3), max_tokens=2, **options),
        )
        for at, options in enumerate(OPTIONS)
    ]
    refuse_eager_steps(rig)
    rig.run()
    other.run()
    for ours, theirs in pairs:
        alike(ours.one, theirs.one)
        for mine, its in zip(tops_of(ours.one), tops_of(theirs.one), strict=True):
            assert [(each.token_id, each.rank) for each in mine] == [
                (each.token_id, each.rank) for each in its
            ]
            assert [each.logprob for each in mine] == pytest.approx(
                [each.logprob for each in its], abs=2e-5
            )


@pytest.mark.failure_mode("F100")
def test_supports_are_those_recorded_step_by_step(tiny: Path, rig: Rig) -> None:
    """With min_tokens, the kernels sample the later tokens: from the whole vocabulary."""
    other = step_by_step(tiny)
    for options in ({"top_p": 0.5}, {"top_k": 3, "min_p": 0.1}, {"min_tokens": 2, "seed": 3}):
        wanted = {"support": True, "max_tokens": 4, "ignore_eos": False, **options}
        completion = rig.generate(ids(3, 5), **wanted)
        assert completion.support is not None
        assert completion.support == other.generate(ids(3, 5), **wanted).support
    assert completion.support.recorded().all()
    assert completion.support.sizes()[-1] == rig.core.config.vocab_size


def refuse_eager_steps(rig: Rig) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("a step left the graphs")

    rig.core.runner.run = refused  # type: ignore[assignment]


def tops_of(completion: Completion) -> list[tuple[Ranked, ...]]:
    prompt = [each.top for each in completion.prompt_logprobs or [] if each is not None]
    return [*(completion.top_logprobs or []), *prompt]


def test_prompts_of_a_step_are_one_batch_and_long_ones_are_cut(tiny: Path, rig: Rig) -> None:
    """A step takes 12 tokens: the first prompt ends in it, the second continues in later steps."""
    other = step_by_step(tiny)
    rig.core.scheduler.max_batch_tokens = 12
    refuse_eager_steps(rig)
    pairs = [
        (rig.submit(ids(at, length), max_tokens=2), other.submit(ids(at, length), max_tokens=2))
        for at, length in enumerate((5, 20, 7))
    ]
    rig.core.step()
    assert [each.computed for each in rig.core.scheduler.running] == [5, 7, 0]
    rig.run()
    other.run()
    for ours, theirs in pairs:
        alike(ours.one, theirs.one)


def test_scores_use_the_same_batches(tiny: Path, rig: Rig) -> None:
    sequences = [ids(1, 9), ids(2, 3), ids(3, 20)]
    expected = step_by_step(tiny).core.score_all(sequences)
    rig.core.model.forward = None  # type: ignore[assignment]
    for ours, theirs in zip(rig.core.score_all(sequences), expected, strict=True):
        assert ours == pytest.approx(theirs, abs=2e-5)


def test_a_long_score_in_pieces_keeps_the_start_of_its_slot(tiny: Path, rig: Rig) -> None:
    """Padding rows write nothing, not even to the slot used for scoring."""
    rig.core.options = replace(rig.core.options, max_batch_tokens=8)
    (ours,), (theirs,) = (
        rig.core.score_all([ids(3, 20)]),
        step_by_step(tiny).core.score_all([ids(3, 20)]),
    )
    assert ours == pytest.approx(theirs, abs=2e-5)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.failure_mode("F15")
def test_a_prompt_that_breaks_fails_alone_before_its_last_piece(tiny: Path, rig: Rig) -> None:
    rig.core.scheduler.max_batch_tokens = 12
    bad, good = rig.submit(ids(1, 20), max_tokens=2), rig.submit(ids(2, 6), max_tokens=2)
    weights = rig.core.served.weights
    kept = weights.embed[bad.handle.request.prompt_ids[5]].clone()
    weights.embed[bad.handle.request.prompt_ids[5]] = float("nan")
    rig.core.step()
    rig.core.step()
    weights.embed[bad.handle.request.prompt_ids[5]] = kept
    assert isinstance(bad.error, BadLogprob)
    rig.run()
    alike(good.one, step_by_step(tiny).generate(ids(2, 6), max_tokens=2))
    assert torch.isfinite(rig.core.cache.v[:, :2]).all()


def test_weights_keep_their_addresses_through_an_update_and_back(
    tiny: Path, rig: Rig, tmp_path: Path
) -> None:
    from tests.engine import checkpoints

    before = rig.core.served.weights
    places = {name: tensor.data_ptr() for name, tensor in before.packed.items()}
    numbers = before.embed.clone()
    tensors = {name: each * 1.01 for name, each in checkpoints.tensors_of(tiny).items()}
    rig.load(checkpoints.save(tiny, tmp_path, tensors), "v2")
    served = rig.core.served.weights
    assert {name: tensor.data_ptr() for name, tensor in served.packed.items()} == places
    assert served.version == "v2"
    assert torch.equal(served.embed, numbers * 1.01)
    assert torch.equal(before.embed, numbers)
    rig.core.rollback()
    assert rig.core.served.weights is before
    assert before.embed.data_ptr() == places["embed"]
    assert torch.equal(before.embed, numbers)
    assert torch.equal(before.layers[0].qkv, before.packed["layers.0.qkv"])


def test_all_shapes_are_warm_before_the_first_request(rig: Rig) -> None:
    note = warm(rig.core, 60)
    assert "decoding up to 4, first tokens up to 4, prompt tokens up to 64" in note
    assert rig.idle
    assert (rig.core.steps, rig.core.generated_tokens, len(rig.core.prefixes)) == (0, 0, 0)


def test_a_time_budget_ends_the_warm_up_and_is_reported(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    note = warm(rig.core, 1e-9)
    assert "larger batches are compiled on first use" in note
    assert note in caplog.text
    rig.generate(ids(1, 5), max_tokens=3)


def test_a_budget_of_zero_skips_the_warm_up(rig: Rig) -> None:
    assert warm(rig.core, 0) == ""


def no_room(*_: object, **__: object) -> None:
    raise OutOfResources(196_608, 101_376, "shared memory")


def test_kernels_that_do_not_fit_the_gpu_are_replaced_by_torchs(
    tiny: Path, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(close_kernels, "linear", no_room)
    note = start.start(rig.core, 60)
    assert "torch's own kernels" in note
    assert "196608" in note
    assert rig.core.overlapped is None
    alike(
        rig.generate(ids(1, 5), max_tokens=4),
        step_by_step(tiny).generate(ids(1, 5), max_tokens=4),
    )


@pytest.mark.close_arithmetic("the exact kernels have no room on the GPU")
@pytest.mark.parametrize("demanded", [True, False])
def test_exact_kernels_that_do_not_fit_fall_back_to_close_unless_requested(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, demanded: bool
) -> None:
    core = rig.core
    core.model.arithmetic = ExactOnDevice()
    core.options = replace(core.options, arithmetic="exact" if demanded else "auto")
    monkeypatch.setattr(start, "prove", lambda core: None)
    monkeypatch.setattr(
        start,
        "warm",
        lambda core, seconds: no_room() if core.model.arithmetic.name == "exact" else "warm",
    )
    if demanded:
        with pytest.raises(EngineFailure, match=r"does not hold on this GPU.*out of resource"):
            start.start(core, 60)
        return
    assert start.start(core, 60) == "warm"
    assert (core.model.arithmetic.name, core.plan.arithmetic) == ("close", "close")
    assert "out of resource" in core.arithmetic_note


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable"),
        CalledProcessError(1, ["gcc", "main.c"]),
    ],
)
def test_a_missing_compiler_is_reported(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(start, "warm", fails)
    with pytest.raises(EngineFailure, match="install gcc and python3-dev"):
        start.start(rig.core, 60)


def test_other_errors_at_start_are_raised(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(start, "warm", fails)
    with pytest.raises(torch.OutOfMemoryError):
        start.start(rig.core, 60)


def test_an_end_token_is_not_sampled_before_min_tokens(tiny: Path, rig: Rig) -> None:
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


def test_a_swap_happens_between_two_tokens(tiny: Path, rig: Rig, tmp_path: Path) -> None:
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


def test_a_pause_delivers_the_token_in_flight(rig: Rig) -> None:
    result = rig.submit(ids(1, 5), max_tokens=6, stream=True)
    launch(rig)
    before = len(result.pieces)
    assert rig.pause("keep") == [None]
    assert len(result.pieces) == before + 1
    assert not rig.core.has_work
    rig.core.resume()
    rig.run()
    assert len([piece for piece in result.pieces if piece.sampled]) == 6


def test_a_prefix_of_overlapped_decoding_is_cached_for_the_next_turn(tiny: Path, rig: Rig) -> None:
    first = rig.generate(ids(1, 30), max_tokens=4)
    turn = [*first.prompt_ids, *first.token_ids, *ids(2, 4)]
    again = rig.generate(turn, max_tokens=3)
    assert rig.core.prefixes.hits >= 32
    alike(again, step_by_step(tiny).generate(turn, max_tokens=3))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.failure_mode("F15")
def test_a_row_that_breaks_fails_alone_and_leaves_nothing_behind(tiny: Path, rig: Rig) -> None:
    bad = rig.submit(ids(1, 7), max_tokens=4)
    good = rig.submit(ids(2, 7), max_tokens=4)
    launch(rig)
    slot = rig.core.scheduler.running.index(bad.handle.sequences[0])
    rig.core.cache.v[:, slot, :, 3] = float("nan")
    rig.run()
    assert isinstance(bad.error, BadLogprob)
    alike(good.one, step_by_step(tiny).generate(ids(2, 7), max_tokens=4))
    assert torch.isfinite(rig.core.cache.v).all()
    again = rig.generate(ids(1, 7), max_tokens=2)
    alike(again, step_by_step(tiny).generate(ids(1, 7), max_tokens=2))


def test_batch_sizes_are_few_and_large_enough() -> None:
    assert [bucket(n) for n in (1, 2, 3, 17, 32, 33, 256)] == [1, 2, 4, 32, 32, 64, 256]


def test_token_counts_are_few_and_the_last_is_the_budget() -> None:
    assert token_sizes(1024) == [8, 16, 32, 64, 128, 256, 384, 512, 768, 1024]
    assert token_sizes(65) == [8, 16, 32, 64, 96]
