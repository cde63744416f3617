"""Kind and parent of each branch of a session, with the evidence for both.

A turn belongs to the branch of the previous turn. Otherwise it opens a branch, whose kind is read
from what the harness sent (`Origin`), then from the tree and the ids of tool calls. Without any
evidence the kind is `unknown`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from lockstep.ledger.origin import NOWHERE, Origin
from lockstep.ledger.tree import Node
from lockstep.tokens.lineage import Kind

PARENT_HEADERS = {
    "codex": "x-codex-parent-thread-id",
    "claude-code": "x-claude-code-agent-id",
    "opencode": "x-parent-session-id",
}
REPEATS_ONLY_RETRIES = {"codex", "claude-code", "opencode", "qwen-code"}
"""Harnesses that resend an equal prompt only because they discarded the previous attempt."""
ALWAYS_WITH_TOOLS = {"claude-code", "opencode", "qwen-code"}
"""Harnesses whose calls without tools are side calls if the same agent has tools otherwise."""
SIDE_KINDS = ("auxiliary", "retry")
AGAIN = "the same prompt was sent again, and this answer not used"
RECENT = 64
"""Number of turns to search backwards for the call that started a sub-agent."""
LONG_TASK = 12
"""Minimum length of a task that is recognised at the end of a message, not only as all of it."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A branch of a session. `number` is the index of its first own turn, `parent` that of the
    branch it came from; a compaction's parent is the branch it replaced.
    """

    number: int
    last: Node
    kind: Kind
    evidence: str
    parent: int | None
    depth: int
    harness: str

    def owns(self, turn: Node) -> bool:
        """Return whether a turn on the path to `last` belongs to this branch, not to an earlier
        one.
        """
        return turn.index >= self.number


def find_branches(nodes: Sequence[Node]) -> list[Branch]:
    """Return the branches of a session, given all its turns by index.

    They are ordered by their start, with side calls and discarded attempts last.
    """
    return _Lineage(nodes).branches()


@dataclass(slots=True, eq=False)
class _Line:
    """A branch under construction; `last` is its latest turn so far."""

    first: Node
    last: Node
    kind: Kind
    evidence: str
    parent: _Line | None

    @property
    def works(self) -> bool:
        return self.kind not in SIDE_KINDS


class _Lineage:
    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._children: dict[int | None, list[Node]] = {}
        for node in nodes:
            self._children.setdefault(_parent_index(node), []).append(node)
        self._with_tools = {_who(node) for node in nodes if node.tools}
        self._discarded = {
            node.index: evidence
            for siblings in self._children.values()
            for node, evidence in (
                *self._thrown(siblings),
                *self._cut(siblings),
                *self._empty(siblings),
            )
        }
        self._lines: list[_Line] = []
        self._of: dict[int, _Line] = {}
        self._by_call: dict[str, _Line] = {}
        for node in nodes:
            self._place(node)
        for line in self._lines:
            if line.parent is None and line.kind not in ("main", "unknown"):
                above = self._later_parent(line)
                # Whatever ids a client sends, a branch never descends from itself.
                if above is not line and above is not None and line not in _above(above):
                    line.parent = above

    def branches(self) -> list[Branch]:
        ordered = sorted(self._lines, key=lambda line: (not line.works, line.first.index))
        return [
            Branch(
                number=line.first.index,
                last=line.last,
                kind=line.kind,
                evidence=line.evidence,
                parent=None if line.parent is None else line.parent.first.index,
                depth=sum(1 for _ in _above(line)),
                harness=_origin(line.first).harness,
            )
            for line in ordered
        ]

    def _place(self, node: Node) -> None:
        before = None if node.parent is None else self._of[node.parent.index]
        if before is not None and self._heir(before, node.parent) is node:
            before.last = node
            line = before
        else:
            kind, evidence, parent = self._opened(node, before)
            line = _Line(node, node, kind, evidence, parent)
            self._lines.append(line)
        self._of[node.index] = line
        if line.works:
            for call in node.reply.tool_calls:
                if call.id:
                    self._by_call[call.id] = line

    def _heir(self, line: _Line, node: Node | None) -> Node | None:
        """Return the turn that continues this one's branch: the first of several with a
        continuation.
        """
        if node is None or node is not line.last:
            return None
        going = [
            child
            for child in self._children.get(node.index, ())
            if child.index not in self._discarded
            and _origin(child).agent == _origin(node).agent
            and _origin(child).window == _origin(node).window
            and (line.kind == "auxiliary" or not self._side(child))
        ]
        # An aborted turn is complete only together with its continuation.
        return max(
            going, key=lambda child: (child.continues, child.index in self._children), default=None
        )

    def _cut(self, siblings: Sequence[Node]) -> Iterator[tuple[Node, str]]:
        """Return the turns that were cut and that a later turn replaced."""
        for at, node in enumerate(siblings):
            if node.finish != "abort" or node.index in self._children:
                continue
            copies = [other for other in siblings if other.kept_of == node.index]
            if copies:
                longest = max(len(other.sampled) for other in copies)
                yield node, f"cut; the agent continued from {longest} of {len(node.sampled)} tokens"
            elif any(
                other.finish != "abort" or other.request_id != node.request_id
                for other in siblings[at + 1 :]
            ):
                yield node, "cut; the agent did not continue from it"

    def _empty(self, siblings: Sequence[Node]) -> Iterator[tuple[Node, str]]:
        """Return the turns without an answer whose agent sent the prompt again with a note."""
        for at, node in enumerate(siblings):
            if node.index in self._children or node.by_ids or node.continues:
                continue
            if node.reply.content.strip() or node.reply.tool_calls:
                continue
            if any(
                _who(other) == _who(node) and _adds_a_note(node, other)
                for other in siblings[at + 1 :]
            ):
                yield node, "no answer; the prompt was sent again with a note"

    def _thrown(self, siblings: Sequence[Node]) -> Iterator[tuple[Node, str]]:
        """Return the discarded attempts among turns with the same prompt."""
        groups: dict[int, list[Node]] = {}
        for node in siblings:
            if not node.continues and not node.by_ids:
                groups.setdefault(id(node.prompt), []).append(node)
        for group in groups.values():
            attempts: dict[str, list[Node]] = {}
            for node in group:
                if not attempts or node.request_id in attempts or _is_retry(group[0], node):
                    attempts.setdefault(node.request_id, []).append(node)
            if len(attempts) < 2:
                continue
            continued = [name for name in attempts if self._any_gone_on(attempts[name])]
            chosen = continued or [list(attempts)[-1]]
            for name, nodes in attempts.items():
                if name not in chosen:
                    yield from ((node, AGAIN) for node in nodes)

    def _any_gone_on(self, nodes: Sequence[Node]) -> bool:
        return any(node.index in self._children for node in nodes)

    def _side(self, node: Node) -> str:
        """Return the evidence that a call is a side call; empty without any."""
        origin = _origin(node)
        if origin.side:
            return origin.side_evidence or origin.side
        if (
            origin.harness in ALWAYS_WITH_TOOLS
            and not node.tools
            and _who(node) in self._with_tools
        ):
            return "no tools, where the same agent has tools otherwise"
        return ""

    def _opened(self, node: Node, before: _Line | None) -> tuple[Kind, str, _Line | None]:
        """Classify a branch that begins with this turn, whose history is in the branch `before`."""
        origin = _origin(node)
        if node.index in self._discarded:
            return "retry", self._discarded[node.index], before
        if side := self._side(node):
            return "auxiliary", side, before or self._recent_line(node)
        own = self._active(node)
        if own is not None and (replaced := self._replaced(node, own)):
            return "compaction", replaced, own
        if origin.parent:
            header = PARENT_HEADERS.get(origin.harness, "the parent's id")
            started = self._line_of_agent(origin.parent)
            return "subagent", f"header {header}", started or before or self._main()
        if before is not None:
            if node.parent is not None and origin.agent != _origin(node.parent).agent:
                return "fork", "the same history, under another id of the harness", before
            return "fork", "the same history up to this turn", before
        if origin.forked_from:
            source = self._line_of_agent(origin.forked_from)
            return "fork", f"forked from {origin.forked_from}", source
        if not origin.agent and (task := self._task(node)) is not None:
            return "subagent", f"its task is in call {task[0]}", task[1]
        if self._main() is None:
            return "main", "it opened the session", None
        source = self._recent_line(node) or self._active(node)
        if node.breaks and source is not None:
            if self._goes_on(node, source):
                end = source.last.index
                return (
                    "main",
                    f"prefix break: {node.breaks[-1]}; nothing follows turn {end}",
                    source,
                )
            return "fork", f"prefix break: {node.breaks[-1]}", source
        return "unknown", "no id, no shared history", None

    def _goes_on(self, node: Node, source: _Line) -> bool:
        """Return whether a branch after a break is the main line again, with a rewritten history.

        Only for programs that are not known otherwise, such as aider: there nothing else tells two
        agents apart than their instructions and tools.
        """
        return (
            source.kind == "main"
            and not _origin(node).agent
            and _origin(node).harness not in ("", *REPEATS_ONLY_RETRIES)
            and not self._children.get(source.last.index)
            and source.first.tools == node.tools
            and _instructions(source.first) == _instructions(node)
        )

    def _replaced(self, node: Node, own: _Line) -> str:
        """Return the evidence that this turn follows a summary of that branch; empty without
        any.
        """
        window, before = _origin(node).window, _origin(own.last).window
        if window and before and window != before:
            return "header x-codex-window-id"
        if node.parent is not None:
            return ""
        for line in reversed(self._lines):
            if _who(line.first) != _who(node):
                continue
            if _origin(line.first).side == "compaction":
                return f"it follows the summary of turn {line.last.index}"
            if line.kind == "compaction":
                break  # that summary was already followed
        return ""

    def _task(self, node: Node) -> tuple[str, _Line] | None:
        """Return the call, and its branch, whose argument is the start of this conversation."""
        question = next((m.content for m in reversed(node.new_messages) if m.role == "user"), "")
        for earlier in reversed(self._nodes[max(0, node.index - RECENT) : node.index]):
            line = self._of[earlier.index]
            # Not only the last turn of its branch: an agent may continue while its child works.
            if not line.works:
                continue
            for call in earlier.reply.tool_calls:
                for task in _texts(call.arguments):
                    if task == question or (len(task) >= LONG_TASK and question.endswith(task)):
                        return call.id or call.name, line
        return None

    def _recent_line(self, node: Node) -> _Line | None:
        """Return the branch whose calls this history contains, or else the same agent's latest."""
        for message in reversed(node.new_messages):
            for call in message.tool_calls:
                if (line := self._by_call.get(call.id)) is not None:
                    return line
        return self._active(node) if _origin(node).agent else None

    def _active(self, node: Node) -> _Line | None:
        """Return the branch that the same agent used last."""
        lines = [line for line in self._lines if line.works and _who(line.last) == _who(node)]
        return max(lines, key=lambda line: line.last.index, default=None)

    def _line_of_agent(self, agent: str) -> _Line | None:
        lines = [line for line in self._lines if line.works and _origin(line.last).agent == agent]
        return max(lines, key=lambda line: line.last.index, default=None)

    def _main(self) -> _Line | None:
        return next((line for line in self._lines if line.kind == "main"), None)

    def _later_parent(self, line: _Line) -> _Line | None:
        """Return the parent of a branch that was sent before it: a title, or one of parallel
        calls.
        """
        parent = _origin(line.first).parent
        if line.kind == "subagent" and parent:
            return self._line_of_agent(parent)
        if line.works:
            return None
        same = [
            candidate
            for candidate in self._lines
            if candidate.works and _who(candidate.first) == _who(line.first)
        ]
        return min(same, key=lambda candidate: candidate.first.index, default=None) or self._main()


def _origin(node: Node) -> Origin:
    return node.origin or NOWHERE


def _who(node: Node) -> tuple[str, str]:
    origin = _origin(node)
    return origin.harness, origin.agent


def _instructions(node: Node) -> list[str]:
    return [message.content for message in node.new_messages if message.role == "system"]


def _adds_a_note(node: Node, other: Node) -> bool:
    """Return whether the messages of `other` are those of `node`, with more text at the end."""
    *before, last = node.new_messages or (None,)
    *others, later = other.new_messages or (None,)
    return (
        last is not None
        and later is not None
        and before == others
        and last.role == later.role == "user"
        and last.content != later.content
        and later.content.startswith(last.content)
    )


def _parent_index(node: Node) -> int | None:
    return None if node.parent is None else node.parent.index


def _is_retry(first: Node, node: Node) -> bool:
    """Return whether a turn with the same prompt as another is a repetition of it."""
    origin = _origin(node)
    if _who(first) != _who(node):
        return False
    return origin.harness in REPEATS_ONLY_RETRIES or origin.retries > 0


def _texts(arguments: str) -> list[str]:
    try:
        values = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, ValueError):
        return []
    if not isinstance(values, dict):
        return []
    return [value for value in values.values() if isinstance(value, str) and value]


def _above(line: _Line) -> Iterator[_Line]:
    while (above := line.parent) is not None:
        yield above
        line = above
