"""Sampling options, through the whole engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.tokens.errors import BadRequest, BadTokenId
from tests.engine.checkpoints import reference
from tests.engine.rig import Rig, ids


@pytest.fixture(scope="module")
def rig(tiny: Path) -> Rig:
    return Rig(tiny, max_batch_tokens=64)


@pytest.fixture(scope="module")
def eos(rig: Rig) -> int:
    return min(rig.core.config.eos_ids)


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.6, "top_p": 0.9}, {"top_k": 5}, {"min_p": 0.05}, {"temperature": 0}],
)
def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(
    rig: Rig, options: dict[str, Any]
) -> None:
    prompt = ids(1, 40)
    alone = rig.generate(prompt, seed=11, max_tokens=20, **options)
    rig.forget_prefixes()
    crowd = [rig.submit(ids(50 + i, 5 + 30 * i), seed=i, max_tokens=9 + i) for i in range(3)]
    rig.run(2)
    among = rig.submit(prompt, seed=11, max_tokens=20, **options)
    crowd += [rig.submit(prompt, seed=i, max_tokens=12) for i in range(3)]
    rig.run()
    assert among.one == alone
    assert len({tuple(a.one.token_ids) for a in crowd}) == len(crowd)


def test_another_seed_gives_other_tokens_and_none_gives_a_fresh_one(rig: Rig) -> None:
    prompt = ids(2, 20)
    outputs = [
        tuple(rig.generate(prompt, seed=seed, temperature=3.0, max_tokens=16).token_ids)
        for seed in (1, 2, None, None)
    ]
    assert len(set(outputs)) == 4


@pytest.mark.exact_arithmetic
@pytest.mark.failure_mode("F11")
def test_choices_are_distinct_matched_by_index_and_each_has_its_own_logprobs(rig: Rig) -> None:
    prompt = ids(3, 50)
    result = rig.submit(prompt, n=5, seed=4, temperature=2.0, max_tokens=12)
    rig.run()
    completion = result.completions
    assert [c.index for c in completion] == [0, 1, 2, 3, 4]
    assert len({tuple(c.token_ids) for c in completion}) == 5
    for choice in completion:
        expected = reference(rig.directory, prompt + choice.token_ids)[-12:]
        assert choice.logprobs == expected


@pytest.mark.exact_arithmetic
def test_choices_of_a_seed_do_not_depend_on_how_many_fit_at_once(rig: Rig, tiny: Path) -> None:
    narrow = Rig(tiny, max_seqs=2)
    wide, few = (r.submit(ids(3, 50), n=5, seed=4, max_tokens=12) for r in (rig, narrow))
    rig.run()
    narrow.run()
    assert few.completions == wide.completions


@pytest.mark.exact_arithmetic
@pytest.mark.parametrize("length", [1, 9, 100])
def test_later_choices_copy_the_whole_prompt_of_the_first(rig: Rig, length: int) -> None:
    rig.forget_prefixes()
    hits, queries = rig.core.prefixes.hits, rig.core.prefixes.queries
    prompt = ids(4, length)
    result = rig.submit(prompt, n=4, seed=7, max_tokens=3)
    rig.run()
    # The last token is computed by each: its logits are needed.
    assert rig.core.prefixes.hits - hits == 3 * (length - 1)
    assert rig.core.prefixes.queries - queries == 4 * length
    rig.forget_prefixes()
    alone = [rig.generate(prompt, seed=7 + at, max_tokens=3) for at in range(4)]
    assert [replace(each, index=0) for each in result.completions] == alone


@pytest.mark.exact_arithmetic
def test_no_choice_copies_a_prompt_computed_by_older_weights(tiny: Path, tiny2: Path) -> None:
    """A weight swap restarts a later choice first when its slot is before that of the first
    choice."""
    rig = Rig(tiny)
    short = rig.submit(ids(3, 9), max_tokens=4)
    result = rig.submit(prompt := ids(4, 9), n=3, seed=7, max_tokens=12)
    while not short.ended:
        rig.run(1)
    leader, *_, last = result.handle.sequences
    assert rig.core.scheduler.running.index(last) < rig.core.scheduler.running.index(leader)
    kept = last.generated
    rig.load(tiny2, "new")
    rig.run()
    choice = result.completions[-1]
    assert choice.logprobs[kept:] == reference(tiny2, prompt + choice.token_ids)[-12 + kept :]


def test_all_choices_have_the_prompt_logprobs(rig: Rig) -> None:
    result = rig.submit(ids(5, 30), n=3, prompt_logprobs=2, max_tokens=3)
    rig.run()
    first, *others = (c.prompt_logprobs for c in result.completions)
    assert first is not None
    assert first[0] is None
    assert [e.token_id for e in first[1:] if e] == ids(5, 30)[1:]
    assert all(len(e.top) == 2 for e in first[1:] if e)
    assert all(other == first for other in others)


def test_a_prompt_of_one_token_has_nothing_to_score(rig: Rig) -> None:
    assert rig.generate([5], prompt_logprobs=0).prompt_logprobs == [None]
    assert rig.core.score([5]) == []


def test_a_stop_token_ends_the_output_and_stays_in_it(rig: Rig) -> None:
    prompt = ids(6, 20)
    free = rig.generate(prompt, seed=3, max_tokens=30).token_ids
    stop = free[12]
    completion = rig.generate(prompt, seed=3, max_tokens=30, stop_token_ids=(stop, 499))
    at = free.index(stop)
    assert (completion.token_ids, completion.finish, completion.stop_token) == (
        free[: at + 1],
        "stop",
        stop,
    )
    assert len(completion.logprobs) == at + 1


def test_min_tokens_delays_stop_tokens(rig: Rig, eos: int) -> None:
    completion = rig.generate(
        ids(7, 20), ignore_eos=False, min_tokens=6, max_tokens=9, logit_bias={eos: 100.0}
    )
    assert eos not in completion.token_ids[:6]
    assert (completion.token_ids[6:], completion.finish, completion.stop_token) == (
        [eos],
        "stop",
        None,
    )
    stopped = rig.generate(
        ids(7, 20), min_tokens=3, max_tokens=9, stop_token_ids=(9,), logit_bias={9: 100.0}
    )
    assert stopped.token_ids.index(9) == 3


def test_min_tokens_with_nothing_left_to_sample_are_rejected(rig: Rig, eos: int) -> None:
    with pytest.raises(BadRequest, match="leaves only end tokens") as refused:
        rig.submit(
            ids(7, 5), allowed_token_ids=(eos, 9), stop_token_ids=(9,), min_tokens=1,
            ignore_eos=False,
        )  # fmt: skip
    assert refused.value.param == "min_tokens"
    completion = rig.generate(ids(7, 5), allowed_token_ids=(eos,), min_tokens=8)
    assert completion.token_ids == [eos] * 8


def test_an_end_token_ends_unless_it_is_to_be_ignored(rig: Rig, eos: int) -> None:
    push: dict[str, Any] = {"logit_bias": {eos: 100.0}, "max_tokens": 5}
    assert rig.generate(ids(8, 9), ignore_eos=False, **push).token_ids == [eos]
    ignored = rig.generate(ids(8, 9), ignore_eos=True, **push)
    assert (ignored.token_ids, ignored.finish) == ([eos] * 5, "length")
    as_stop = rig.generate(ids(8, 9), ignore_eos=True, stop_token_ids=(eos,), **push)
    assert (as_stop.token_ids, as_stop.stop_token) == ([eos], eos)


def test_only_allowed_tokens_are_sampled(rig: Rig) -> None:
    completion = rig.generate(ids(9, 9), allowed_token_ids=(17, 33), max_tokens=30, temperature=5.0)
    assert set(completion.token_ids) == {17, 33}


def test_each_token_has_alternatives_and_a_rank(rig: Rig) -> None:
    completion = rig.generate(ids(10, 20), logprobs=5, max_tokens=15, temperature=2.0)
    assert completion.top_logprobs is not None
    assert completion.ranks is not None
    for token, logprob, rank, top in zip(
        completion.token_ids,
        completion.logprobs,
        completion.ranks,
        completion.top_logprobs,
        strict=True,
    ):
        assert [t.rank for t in top] == [1, 2, 3, 4, 5]
        assert [t.logprob for t in top] == sorted((t.logprob for t in top), reverse=True)
        if rank <= 5:
            assert (top[rank - 1].token_id, top[rank - 1].logprob) == (token, logprob)
        else:
            assert logprob <= top[-1].logprob
    assert rig.generate(ids(10, 20)).top_logprobs is None


@pytest.mark.exact_arithmetic
def test_raw_logprobs_are_of_the_untouched_model(rig: Rig) -> None:
    odd: dict[str, Any] = {"temperature": 0.5, "top_k": 7, "logit_bias": {3: 2.0}}
    completion = rig.generate(ids(11, 20), **odd)
    whole = completion.prompt_ids + completion.token_ids
    assert completion.logprobs == reference(rig.directory, whole)[-8:]
    assert (completion.logprob_mode, completion.temperature) == ("raw", 0.5)


@pytest.mark.exact_arithmetic
def test_greedy_processed_logprobs_are_of_the_untempered_model(rig: Rig) -> None:
    completion = rig.generate(ids(11, 20), temperature=0, logprob_mode="processed", logprobs=1)
    assert (
        completion.logprobs
        == reference(rig.directory, completion.prompt_ids + completion.token_ids)[-8:]
    )
    assert [top[0].token_id for top in completion.top_logprobs or []] == completion.token_ids


@pytest.mark.failure_mode("F16")
def test_the_completion_names_its_logprob_mode(tiny: Path) -> None:
    rig = Rig(tiny, logprob_mode="processed", worker="w1")
    completion = rig.generate(ids(1, 5), temperature=0.7)
    assert (completion.logprob_mode, completion.temperature, completion.worker) == (
        "processed",
        0.7,
        "w1",
    )
    assert rig.generate(ids(1, 5), logprob_mode="raw").logprob_mode == "raw"


@pytest.mark.failure_mode("F18")
@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([], "token_ids is empty"),
        ([1, -2, -3], r"token_ids\[1\] is -2"),
        ([1, 2, 512, 900], r"token_ids\[2\] is 512"),
    ],
)
def test_bad_ids_are_rejected_with_their_position(rig: Rig, prompt: list[int], says: str) -> None:
    with pytest.raises(BadTokenId, match=says):
        rig.submit(prompt)
    with pytest.raises(BadTokenId, match=says):
        rig.core.score(prompt)
    assert rig.idle


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
def test_bad_ids_in_options_are_rejected_with_their_position(rig: Rig, field: str) -> None:
    with pytest.raises(BadTokenId, match=rf"{field}\[1\] is 512"):
        rig.submit([1], **{field: (4, 512)})
    with pytest.raises(BadTokenId, match=r"logit_bias\[0\] is -1"):
        rig.submit([1], logit_bias={-1: 3.0})


def test_routed_experts_of_a_dense_model_are_rejected(rig: Rig) -> None:
    with pytest.raises(BadRequest, match="this model has none"):
        rig.submit([1], experts_start=0)
