"""Memory of steps in flight: each step has its own, however many of one batch size there are."""

from __future__ import annotations

import torch

from lockstep.engine.cuda.table import GraphRow, StepInFlight, Table


def launch(table: Table, token: int) -> StepInFlight:
    """Launch a step that draws this token, without reading it."""
    row = GraphRow(slot=0, position=0, token=token, uniform=0.5, temperature=1.0, processed=False)
    table.fill([row, row], spare=0)
    return table.fetch([row, row])


def test_steps_of_one_size_keep_their_tokens_until_they_are_read() -> None:
    table = Table(torch.zeros(2, 8))
    steps = [launch(table, token) for token in range(5)]
    assert [[each.token_id for each in step.read()] for step in steps] == [[t, t] for t in range(5)]


def test_uploads_are_not_overwritten_before_their_step_is_read() -> None:
    table = Table(torch.zeros(2, 8))
    steps = [launch(table, token) for token in range(3)]
    table.refill([0.25, 0.25])
    steps.append(table.fetch(steps[0].rows))
    assert len({step.host.up.data_ptr() for step in steps}) == 4
    assert [int(step.host.up[5, 0]) for step in steps[:3]] == [0, 1, 2]


def test_memory_of_read_steps_is_reused() -> None:
    table = Table(torch.zeros(2, 8))
    first = launch(table, 1)
    second = launch(table, 2)
    first.read()
    third = launch(table, 3)
    assert third.host is first.host
    assert third.host is not second.host
