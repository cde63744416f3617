"""Sessions as the dashboard shows them: table rows, the tree, tokens, and prefix breaks."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence

import msgspec

from lockstep.dashboard.branch_tokens import BranchTokens, TokenPage, token_texts
from lockstep.gateway.context import GatewayContext
from lockstep.gateway.sessions.info import SessionInfo
from lockstep.ledger.branch_sample import trained_turns
from lockstep.ledger.cut_turns import sampled_once
from lockstep.ledger.lineage import Branch, find_branches
from lockstep.ledger.tree import Node
from lockstep.render import Renderer
from lockstep.tokens.errors import LockstepError, NotFound

MOST_ROWS = 4000
MOST_BRANCHES = 8
"""Branches whose tokens are cached for the next page."""
CONTEXT_TOKENS = 120
PREVIEW = 160


class SessionLine(msgspec.Struct, frozen=True):
    """A session in the table."""

    info: SessionInfo
    harness: str
    kinds: dict[str, int]
    breaks: dict[str, int]
    sampled: int
    prompt: str


class SessionTable(msgspec.Struct, frozen=True):
    """A page of sessions, last used first; `total` counts all matches of the search."""

    rows: list[SessionLine]
    total: int


class TurnRow(msgspec.Struct, frozen=True):
    """A turn of a session. `text` is the beginning of its reply."""

    index: int
    parent: int | None
    branch: int
    prompt: int
    sampled: int
    end: int
    finish: str
    worker: str | None
    versions: list[str]
    breaks: list[str]
    broke: bool
    text: str


class BranchRow(msgspec.Struct, frozen=True):
    """A branch of a session; `number` is its first own turn.

    `trainable` counts the sampled tokens that a sample of the branch trains by default.
    """

    number: int
    kind: str
    evidence: str
    parent: int | None
    depth: int
    harness: str
    last: int
    turns: int
    tokens: int
    sampled: int
    trainable: int


class SessionTree(msgspec.Struct, frozen=True):
    """A session: its branches, and every turn."""

    row: SessionLine
    branches: list[BranchRow]
    turns: list[TurnRow]


class BreakView(msgspec.Struct, frozen=True):
    """A prefix break: the stored history and the new prompt, from shortly before they differ.

    `other` is the turn whose ids have most in common with the new prompt, `shared` how many.
    """

    turn: int
    cause: str
    other: int | None
    shared: int
    before: str
    stored: str
    sent: str
    stored_ids: list[int]
    sent_ids: list[int]


class SessionViews:
    """Reader of sessions for the page. Values derived from turns are cached until a turn is
    added.
    """

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._rows: OrderedDict[str, tuple[int, SessionLine]] = OrderedDict()
        self._tokens: OrderedDict[tuple[str, int, int], BranchTokens] = OrderedDict()

    async def table(self, search: str, *, limit: int, offset: int) -> SessionTable:
        """Return the sessions whose id or harness contains `search`."""
        sessions, wanted = self._context.sessions, search.lower()

        def matches(name: str) -> bool:
            cached = self._rows.get(name)
            return wanted in name.lower() or (
                cached is not None and wanted in cached[1].harness.lower()
            )

        names, total = await sessions.latest(matches, limit=limit, offset=offset)
        rows = [await self._row(name) for name in names]
        return SessionTable([row for row in rows if row is not None], total)

    async def tree(self, name: str) -> SessionTree:
        """Return the tree of a session. Raises NotFound, and Unavailable if it cannot be read."""
        nodes, breaks = await self._context.sessions.turns(name)
        info = await self._context.sessions.info(name)
        return await asyncio.to_thread(_tree, info, nodes, breaks)

    async def branch(self, name: str, number: int) -> BranchTokens:
        """Return the tokens of a branch. Raises NotFound."""
        nodes, _ = await self._context.sessions.turns(name)
        key = name, number, len(nodes)
        tokens = self._tokens.get(key)
        if tokens is None:
            renderer = await self._renderer()
            tokens = await asyncio.to_thread(_branch_tokens, nodes, number, renderer)
            self._tokens[key] = tokens
            while len(self._tokens) > MOST_BRANCHES:
                self._tokens.popitem(last=False)
        self._tokens.move_to_end(key)
        return tokens

    async def page(self, name: str, number: int, start: int, end: int) -> TokenPage:
        """Return a page of the tokens of a branch. Raises NotFound."""
        return (await self.branch(name, number)).page(start, end)

    async def prefix_break(self, name: str, turn: int) -> BreakView:
        """Return where the prompt of a turn differs from the history before it. Raises NotFound."""
        nodes, _ = await self._context.sessions.turns(name)
        if not 0 <= turn < len(nodes) or not nodes[turn].breaks:
            raise NotFound(f"turn {turn} of session {name!r} has no prefix break", param="turn")
        renderer = await self._renderer()
        return await asyncio.to_thread(_break_view, nodes, nodes[turn], renderer)

    async def _row(self, name: str) -> SessionLine | None:
        try:
            info = await self._context.sessions.info(name)
            cached = self._rows.get(name)
            if cached is None or cached[0] != info.turns:
                nodes, breaks = await self._context.sessions.turns(name)
                row = await asyncio.to_thread(_session_line, info, nodes, breaks)
            else:
                row = msgspec.structs.replace(cached[1], info=info)
        except LockstepError:
            return None  # deleted meanwhile, or unreadable: its own page says why
        self._rows[name] = info.turns, row
        while len(self._rows) > MOST_ROWS:
            self._rows.popitem(last=False)
        return row

    async def _renderer(self) -> Renderer | None:
        try:
            return await self._context.models.renderer()
        except LockstepError:
            return None  # without a tokenizer, tokens still have ids


def _session_line(info: SessionInfo, nodes: Sequence[Node], breaks: Counter[str]) -> SessionLine:
    branches = find_branches(nodes)
    question = next(
        (m.content for node in nodes for m in node.new_messages if m.role == "user"), ""
    )
    return SessionLine(
        info=info,
        harness=next((branch.harness for branch in branches if branch.harness), ""),
        kinds=dict(Counter(branch.kind for branch in branches)),
        breaks=dict(breaks),
        sampled=sum(sampled_once(nodes).values()),
        prompt=_short(question),
    )


def _tree(info: SessionInfo, nodes: Sequence[Node], breaks: Counter[str]) -> SessionTree:
    branches, counts = find_branches(nodes), sampled_once(nodes)
    owner: dict[int, Branch] = {}
    for branch in branches:
        for node in branch.last.path():
            if branch.owns(node):
                owner.setdefault(node.index, branch)
    turns = [_turn_row(node, owner[node.index].number) for node in nodes if node.index in owner]
    return SessionTree(
        row=_session_line(info, nodes, breaks),
        branches=[_branch_row(row, counts) for row in branches],
        turns=turns,
    )


def _turn_row(node: Node, branch: int) -> TurnRow:
    text = node.reply.content or node.reply.reasoning or ""
    calls = ", ".join(f"{call.name}({call.arguments})" for call in node.reply.tool_calls)
    return TurnRow(
        index=node.index,
        parent=None if node.parent is None else node.parent.index,
        branch=branch,
        prompt=len(node.prompt),
        sampled=len(node.sampled),
        end=node.end,
        finish=node.finish,
        worker=node.worker,
        versions=list(dict.fromkeys(span.version for span in node.versions)),
        breaks=list(node.breaks),
        broke=bool(node.breaks) and node.parent is None,
        text=_short(text or calls),
    )


def _branch_row(branch: Branch, counts: Mapping[int, int]) -> BranchRow:
    own = [node for node in branch.last.path() if branch.owns(node)]
    return BranchRow(
        number=branch.number,
        kind=branch.kind,
        evidence=branch.evidence,
        parent=branch.parent,
        depth=branch.depth,
        harness=branch.harness,
        last=branch.last.index,
        turns=len(own),
        tokens=branch.last.end,
        sampled=sum(counts[node.index] for node in own),
        trainable=sum(len(node.sampled) for node in trained_turns(branch)),
    )


def _branch_tokens(nodes: Sequence[Node], number: int, renderer: Renderer | None) -> BranchTokens:
    for branch in find_branches(nodes):
        if branch.number == number:
            return BranchTokens.of(nodes, branch, renderer)
    raise NotFound(f"the session has no branch {number}", param="branch")


def _break_view(nodes: Sequence[Node], node: Node, renderer: Renderer | None) -> BreakView:
    sent = node.ids()[: node.sampled_start]
    other, shared, stored = None, 0, sent[:0]
    for earlier in nodes[: node.index]:
        if earlier.children:
            continue  # its ids are a prefix of those of a later turn
        ids = earlier.ids()
        common = next((at for at, (a, b) in enumerate(zip(ids, sent, strict=False)) if a != b),
                      min(len(ids), len(sent)))  # fmt: skip
        if other is None or common > shared:
            other, shared, stored = earlier.index, common, ids
    window = slice(shared, shared + CONTEXT_TOKENS)
    start = max(0, shared - CONTEXT_TOKENS // 2)
    return BreakView(
        turn=node.index,
        cause=node.breaks[-1],
        other=other,
        shared=shared,
        before="".join(token_texts(sent[start:shared], renderer)),
        stored="".join(token_texts(stored[window], renderer)),
        sent="".join(token_texts(sent[window], renderer)),
        stored_ids=stored[window].tolist(),
        sent_ids=sent[window].tolist(),
    )


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= PREVIEW else line[: PREVIEW - 1] + "…"
