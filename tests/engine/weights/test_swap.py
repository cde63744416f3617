"""Weight swaps with requests in flight: every token keeps its version, no old key is reused."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.tokens import Completion, VersionSpan
from lockstep.tokens.errors import Conflict, VersionUnavailable
from tests.engine.checkpoints import reference
from tests.engine.rig import Rig, ids


@pytest.fixture
def rig(tiny: Path) -> Rig:
    return Rig(tiny, weight_version="v1", max_seqs=4, max_batch_tokens=64)


def check_spans(completion: Completion, weights: dict[str, Path]) -> None:
    """Check that each span has the logprobs of its own weights, over the whole context before
    it."""
    whole = completion.prompt_ids + completion.token_ids
    for span in completion.versions:
        expected = reference(weights[span.version], whole)[-len(completion.token_ids) :]
        assert completion.logprobs[span.start : span.end] == expected[span.start : span.end]


@pytest.mark.exact_arithmetic
@pytest.mark.failure_mode("F43")
@pytest.mark.failure_mode("F27")
@pytest.mark.parametrize("paused", [True, False])
def test_tokens_before_and_after_a_swap_have_their_own_versions(
    rig: Rig, tiny: Path, tiny2: Path, paused: bool
) -> None:
    results = [rig.submit(ids(i, 30 + 40 * i), max_tokens=24, seed=i) for i in range(3)]
    rig.run(8)
    at = [len(a.tokens_so_far) for a in results]
    assert min(at) > 0
    if paused:
        rig.pause("keep")
    rig.load(tiny2, "v2")
    if paused:
        rig.core.resume()
    rig.run()
    for result, swapped in zip(results, at, strict=True):
        completion = result.one
        assert completion.versions == (
            VersionSpan("v1", 0, swapped),
            VersionSpan("v2", swapped, 24),
        )
        check_spans(completion, {"v1": tiny, "v2": tiny2})


@pytest.mark.exact_arithmetic
@pytest.mark.failure_mode("F27")
def test_a_swap_during_a_prefill_restarts_the_prompt(rig: Rig, tiny: Path, tiny2: Path) -> None:
    result = rig.submit(ids(1, 200), prompt_logprobs=0)
    rig.run(2)
    assert result.tokens_so_far == []
    rig.load(tiny2, "v2")
    rig.run()
    completion = result.one
    assert {span.version for span in completion.versions} == {"v2"}
    expected = reference(tiny2, completion.prompt_ids + completion.token_ids)
    assert [e.logprob for e in completion.prompt_logprobs or [] if e] == expected[:199]
    assert completion.logprobs == expected[199:]


@pytest.mark.exact_arithmetic
def test_swaps_back_and_forth_stay_exact(rig: Rig, tiny: Path, tiny2: Path) -> None:
    result = rig.submit(ids(1, 40), max_tokens=40)
    rig.run(6)
    rig.load(tiny2, "v2")
    rig.run(6)
    rig.core.rollback()
    rig.run(6)
    rig.load(tiny2, "v3")
    rig.load(tiny, "v4")
    rig.run()
    spans = [span.version for span in result.one.versions]
    assert spans == ["v1", "v2", "v1", "v4"]
    check_spans(result.one, {"v1": tiny, "v2": tiny2, "v4": tiny})


@pytest.mark.exact_arithmetic
def test_choices_that_start_after_a_swap_have_the_new_version(
    rig: Rig, tiny: Path, tiny2: Path
) -> None:
    result = rig.submit(ids(1, 40), n=7, max_tokens=10)
    rig.run(5)
    rig.load(tiny2, "v2")
    rig.run()
    assert result.completions[0].versions[0].version == "v1"
    assert [s.version for s in result.completions[-1].versions] == ["v2"]
    for completion in result.completions:
        check_spans(completion, {"v1": tiny, "v2": tiny2})


@pytest.mark.failure_mode("F43")
def test_a_request_ends_when_its_required_version_is_replaced(rig: Rig, tiny2: Path) -> None:
    with pytest.raises(VersionUnavailable, match=r"'v2' was demanded, but 'v1' is served"):
        rig.submit(ids(1, 20), weight_version="v2")
    result = rig.submit(ids(1, 20), weight_version="v1", n=6, max_tokens=20)
    rig.run(4)
    rig.load(tiny2, "v2")
    rig.run()
    assert [c.finish for c in result.completions] == ["abort"] * 6
    assert len(result.completions[0].token_ids) > 0
    assert {s.version for c in result.completions for s in c.versions} == {"v1"}
    assert rig.generate(ids(1, 20), weight_version="v2").finish == "length"
    assert rig.idle


@pytest.mark.failure_mode("F43")
def test_a_required_version_is_checked_again_when_the_request_starts(rig: Rig, tiny2: Path) -> None:
    rig.pause("keep")
    result = rig.submit(ids(1, 20), weight_version="v1")
    rig.load(tiny2, "v2")
    rig.core.resume()
    rig.run()
    assert isinstance(result.error, VersionUnavailable)
    assert rig.idle


@pytest.mark.failure_mode("F43")
def test_a_minimum_version_is_met_by_it_and_later_ones(rig: Rig, tiny2: Path) -> None:
    with pytest.raises(VersionUnavailable, match="'v2' or later"):
        rig.submit(ids(1, 20), min_weight_version="v2")
    rig.load(tiny2, "v2")
    for floor in ("v1", "v2"):
        assert rig.generate(ids(1, 20), min_weight_version=floor).versions[0].version == "v2"
    rig.core.rollback()
    with pytest.raises(VersionUnavailable, match="'v2' or later"):
        rig.submit(ids(1, 20), min_weight_version="v2")


@pytest.mark.exact_arithmetic
def test_one_commit_can_be_undone_once(rig: Rig, tiny: Path, tiny2: Path) -> None:
    with pytest.raises(Conflict, match="nothing to roll back"):
        rig.core.rollback()
    rig.load(tiny2, "v2")
    rig.core.rollback()
    completion = rig.generate(ids(1, 20))
    assert completion.versions == (VersionSpan("v1", 0, 8),)
    check_spans(completion, {"v1": tiny})
    with pytest.raises(Conflict, match="nothing to roll back"):
        rig.core.rollback()


@pytest.mark.exact_arithmetic
def test_scoring_staged_weights_disturbs_nothing(rig: Rig, tiny: Path, tiny2: Path) -> None:
    alone = Rig(tiny, weight_version="v1").generate(ids(1, 40), max_tokens=20)
    staged = rig.core.served.load_weights(tiny2, "v2")
    result = rig.submit(ids(1, 40), max_tokens=20)
    while rig.core.has_work:
        rig.run(3)
        probe = ids(len(result.tokens_so_far), 70)
        assert rig.core.score(probe, weights=staged) == reference(tiny2, probe)
        assert rig.core.score(probe) == reference(tiny, probe)
    assert result.one == alone
