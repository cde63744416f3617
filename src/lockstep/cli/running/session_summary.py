"""The branches of a recorded session as a tree: kind, turns, tokens, and breaks with causes."""

from __future__ import annotations

from collections import Counter

from rich.markup import escape
from rich.tree import Tree

from lockstep.dashboard.session_view import BranchRow, SessionTree, TurnRow


def session_summary(session: SessionTree) -> Tree:
    """Return the tree of a session's branches."""
    branches = session.branches
    sampled = sum(turn.sampled for turn in session.turns)
    trainable = sum(branch.trainable for branch in branches)
    harness = f" of {session.row.harness}" if session.row.harness else ""
    root = Tree(
        f"[bold]{escape(session.row.info.id)}[/]: {_count(len(session.turns), 'turn')}"
        f"{escape(harness)}, {sampled:,} tokens sampled, {trainable:,} trainable"
    )
    nodes: dict[int | None, Tree] = {}
    # A branch is listed after those that it came from, whatever their order in the session.
    for branch in sorted(branches, key=lambda branch: (branch.depth, branch.number)):
        turns = [turn for turn in session.turns if turn.branch == branch.number]
        nodes[branch.number] = nodes.get(branch.parent, root).add(_branch_line(branch, turns))
    return root


def _branch_line(branch: BranchRow, turns: list[TurnRow]) -> str:
    line = (
        f"[cyan]{branch.kind}[/] {_count(len(turns), 'turn')}, {branch.sampled:,} sampled, "
        f"{branch.trainable:,} trainable"
    )
    if branch.trainable < branch.sampled:
        line += f" ({_why_masked(branch, turns)})"
    for turn in turns:
        if turn.broke:
            line += f"\n[yellow]break before turn {turn.index}: {turn.breaks[-1]}[/]"
    if branch.evidence:
        line += f"\n[dim]{escape(branch.evidence)}[/]"
    return line


def _why_masked(branch: BranchRow, turns: list[TurnRow]) -> str:
    if branch.kind == "retry":
        return "a discarded attempt"
    ends = Counter(turn.finish for turn in turns)
    return f"{_count(ends['abort'], 'aborted turn')} masked"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
