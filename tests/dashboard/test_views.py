"""What the views derive: tokens that agree with the samples, breaks, phases, latencies."""

from __future__ import annotations

from itertools import groupby
from typing import Any, cast

import pytest

from lockstep.dashboard.branch_tokens import PAGE_TOKENS
from lockstep.dashboard.fleet_view import operation_row
from lockstep.dashboard.health_view import quantile
from lockstep.dashboard.session_view import SessionViews
from lockstep.gateway.context import GatewayContext
from lockstep.gateway.sessions.sessions import Sessions
from lockstep.render import Renderer
from lockstep.render.authors import authors, messages
from lockstep.tokens import Completion, Shaping, Support, VersionSpan
from lockstep.tokens.errors import NotFound
from lockstep.tokens.operation import DeltaSummary, FetchSummary, Operation, WorkerResult


class Models:
    """Has the renderer of the bundled model."""

    def __init__(self) -> None:
        self.loaded = Renderer.load("tiny")

    async def renderer(self) -> Renderer:
        return self.loaded


MODELS = Models()


def views(sessions: Sessions) -> SessionViews:
    context: Any = GatewayContext(pool=cast(Any, None), models=cast(Any, MODELS), sessions=sessions)
    return SessionViews(context)


async def say(
    sessions: Sessions,
    name: str,
    history: list[dict[str, Any]],
    reply: str,
    finish: str = "stop",
    **more: Any,
) -> list[dict[str, Any]]:
    """One turn in which the model says `reply`; the history with it."""
    renderer = MODELS.loaded
    session = await sessions.open(name, renderer)
    plan = await session.plan(history)
    prompt = list(plan.prompt_ids)
    ids = renderer.encode(reply + "<|im_end|>")
    half = len(ids) // 2
    completion = Completion(
        token_ids=ids, logprobs=[-0.25 * (at + 1) for at in range(len(ids))], prompt_ids=prompt,
        finish=cast(Any, finish), worker="w0", request_id=f"r{len(history)}",
        versions=(VersionSpan("one", 0, half), VersionSpan("two", half, len(ids))), **more,
    )  # fmt: skip
    message = {"role": "assistant", "content": reply}
    await session.commit(plan, [(completion, message)])
    return [*history, message]


async def test_the_tokens_of_a_branch_are_those_of_its_sample() -> None:
    async with Sessions() as sessions:
        history = await say(sessions, "s", [{"role": "user", "content": "Reverse: 12"}], "21")
        await say(sessions, "s", [*history, {"role": "user", "content": "And 34?"}], "43")
        (sample,) = await sessions.samples("s")
        tokens = await views(sessions).branch("s", 0)
        page = tokens.page(0, 10**6)
        assert page.ids == sample.token_ids
        spread = [value for value, times in page.mask for _ in range(times)]
        assert spread == sample.sampled_mask
        assert [value or 0.0 for value in page.logprobs] == sample.logprobs
        spans = {at: s.version for s in sample.versions for at in range(s.start, s.end)}
        versions = [value for value, times in page.versions for _ in range(times)]
        assert versions == [spans.get(at) for at in range(len(page.ids))]
        assert [span.author for span in tokens.segments] == ["user", "assistant"] * 2
        assert [span.end for span in tokens.segments[:-1]] == [s.start for s in tokens.segments[1:]]
        assert "".join(page.texts) == MODELS.loaded.decode(sample.token_ids)


@pytest.mark.failure_mode("F100")
async def test_tokens_show_the_size_of_the_sets_they_were_drawn_from() -> None:
    async with Sessions() as sessions:
        question = {"role": "user", "content": "Hi"}
        ids = MODELS.loaded.encode("a<|im_end|>")
        support = Support.of_ids([[token, 600 + at] for at, token in enumerate(ids)], 1000)
        recorded = {"shaping": Shaping(top_p=0.9), "support": support}
        history = await say(sessions, "s", [question], "a", **recorded)
        truncated = Shaping(top_p=0.9)
        history = await say(sessions, "s", [*history, question], "a", shaping=truncated)
        await say(sessions, "s", [*history, question], "a")
        page = (await views(sessions).branch("s", 0)).page(0, 10**6)
        runs = [value for value, _ in groupby(page.supports)]
        assert runs == [None, 2, None, 0, None]


async def test_an_aborted_turn_is_sampled_and_masked() -> None:
    async with Sessions() as sessions:
        await say(sessions, "s", [{"role": "user", "content": "Hi"}], "21", finish="abort")
        page = (await views(sessions).branch("s", 0)).page(0, 10**6)
        assert [value for value, _ in page.sampled] == [False, True]
        assert [value for value, _ in page.mask] == [False]


async def test_a_branch_has_as_many_trainable_tokens_as_its_samples() -> None:
    async with Sessions() as sessions:
        hi = {"role": "user", "content": "Hi"}
        history = await say(sessions, "s", [hi], "one")
        await say(sessions, "s", [*history, hi], "cut", finish="abort")
        # The temperature splits this branch into two samples.
        warm = await say(sessions, "s", [*history, hi, hi], "warm", temperature=0.5)
        await say(sessions, "s", [*warm, hi], "end")
        tree = await views(sessions).tree("s")
        samples = await sessions.samples("s")
        assert len(samples) > len(tree.branches) == 2
        for branch in tree.branches:
            masks = [s.sampled_mask for s in samples if s.branch == branch.number]
            assert branch.trainable == sum(map(sum, masks))
        assert sum(branch.trainable < branch.sampled for branch in tree.branches) == 1


async def test_looking_at_a_session_does_not_count_as_reading_it() -> None:
    async with Sessions() as sessions:
        await say(sessions, "s", [{"role": "user", "content": "Hi"}], "Ho")
        shown = views(sessions)
        await shown.tree("s")
        await shown.branch("s", 0)
        assert (await sessions.info("s")).unread_turns == 1


async def test_a_page_of_tokens_is_bounded() -> None:
    async with Sessions() as sessions:
        await say(sessions, "s", [{"role": "user", "content": "Hi"}], "again " * 3000)
        tokens = await views(sessions).branch("s", 0)
        assert len(tokens.ids) > PAGE_TOKENS
        assert len(tokens.page(0, 10**9).ids) == PAGE_TOKENS
        assert tokens.page(10**6, 10**9).ids == []


async def test_a_break_is_shown_from_where_the_texts_part() -> None:
    async with Sessions() as sessions:
        history = await say(sessions, "s", [{"role": "user", "content": "Reverse: 12"}], "21")
        changed = [history[0], {"role": "assistant", "content": "never said"}]
        await say(sessions, "s", [*changed, {"role": "user", "content": "And 34?"}], "43")
        shown = views(sessions)
        tree = await shown.tree("s")
        assert [turn.broke for turn in tree.turns] == [False, True]
        assert tree.row.breaks == {"edited_history": 1}
        shown_break = await shown.prefix_break("s", 1)
        assert (shown_break.cause, shown_break.other) == ("edited_history", 0)
        assert shown_break.before.endswith("assistant\n")
        assert shown_break.stored.startswith("21")
        assert shown_break.sent.startswith("never said")
        with pytest.raises(NotFound):
            await shown.prefix_break("s", 0)


async def test_the_table_is_searched_by_session_and_the_last_used_comes_first() -> None:
    async with Sessions() as sessions:
        for name in ("one-a", "two-b", "one-c"):
            await say(sessions, name, [{"role": "user", "content": f"I am {name}"}], "Ho")
        shown = views(sessions)
        table = await shown.table("", limit=2, offset=0)
        assert [row.info.id for row in table.rows] == ["one-c", "two-b"]
        assert table.total == 3
        table = await shown.table("ONE", limit=10, offset=0)
        assert [row.info.id for row in table.rows] == ["one-c", "one-a"]
        assert table.rows[0].prompt == "I am one-c"


def test_messages_keep_the_template_that_frames_them() -> None:
    texts = ["<|im_start|>", "user", "\n", "Hi", "<|im_end|>", "\n", "<|im_start|>", "assistant",
             "\n", "Ho", "<|im_end|>"]  # fmt: skip
    written = authors(texts, [False] * 9 + [True, True])
    assert list(messages(texts, written)) == [("user", 0, 6), ("assistant", 6, 11)]


def test_an_operation_has_the_longest_phase_of_any_worker() -> None:
    operation = Operation("1", "update_weights", {}, nbytes=12)
    operation.workers = {
        "a": WorkerResult(seconds={"stage": 0.5, "commit": 0.1}),
        "b": WorkerResult(seconds={"stage": 0.7}),
    }
    row = operation_row(operation)
    assert (row.phases, row.nbytes) == ({"stage": 0.7, "commit": 0.1}, 12)


@pytest.mark.parametrize(
    ("buckets", "share", "expected"),
    [
        ({}, 0.5, None),
        ({0.1: 0.0, float("inf"): 0.0}, 0.5, None),
        ({0.1: 10.0, 0.2: 10.0, float("inf"): 10.0}, 0.5, 0.05),
        ({0.1: 0.0, 0.2: 10.0, float("inf"): 10.0}, 1.0, 0.2),
        ({0.1: 1.0, 0.2: 1.0, float("inf"): 10.0}, 0.95, 0.2),
    ],
)
def test_a_latency_lies_within_its_bucket(
    buckets: dict[float, float], share: float, expected: float | None
) -> None:
    assert quantile(buckets, share) == expected


def test_an_operation_says_what_a_delta_changes_and_what_was_fetched() -> None:
    delta = DeltaSummary("step-1", 1, nbytes=50, full_bytes=1000, changed=3, values=400)
    operation = Operation("1", "update_weights", {}, nbytes=1000, delta=delta)
    assert operation_row(operation).fetched_bytes is None
    operation.fetched = FetchSummary(nbytes=60, total=1060, seconds=0.1)
    operation.workers["w0"] = WorkerResult(fetched=FetchSummary(0, 1060, 0.1))
    operation.workers["w1"] = WorkerResult(fetched=FetchSummary(60, 60, 0.1))
    row = operation_row(operation)
    assert (row.delta_bytes, row.changed, row.fetched_bytes) == (50, 0.0075, 120)
