"""Ledger of a session: every prompt starts with the exact ids before it, or records why not.

`plan` finds the longest stored history of a request and returns its ids and the bridge to the new
messages. `commit` stores the sampled turn, whole or not at all. It has no HTTP and no engine: the
client and the gateway both use it.
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import msgspec

from lockstep.http.off_loop import is_large_history, off_loop
from lockstep.ledger import codec
from lockstep.ledger.branch_sample import branch_sample, branch_samples
from lockstep.ledger.breaks import CLIENT_BREAKS, Breaks, check_breaks
from lockstep.ledger.cut_turns import kept_node
from lockstep.ledger.matching import (
    EXPLAINED,
    UNREAD,
    Cause,
    PromptPlan,
    find_prompt,
    light_prompt,
    read_request,
)
from lockstep.ledger.tree import (
    IDS,
    LOGPROBS,
    Node,
    Reply,
    cost,
    longest_by_ids,
    own_experts,
)
from lockstep.ledger.turn_cache import IdJsonCache, ReadHistory
from lockstep.protocol.json.lazy_ids import as_list
from lockstep.render.messages import Message, canonical, plain_messages
from lockstep.render.renderer import Renderer
from lockstep.tokens import Completion, Sample
from lockstep.tokens.errors import BadRequest, BadTokenId, Conflict, Misaligned, PrefixBreak

log = logging.getLogger(__name__)
MadeTurn = tuple[Node, Node | None]
"""A turn, and the earlier one with the same prompt, if there is one."""


class Ledger:
    """The turns of one session.

        ledger = Ledger(renderer)
        plan = ledger.plan([{"role": "user", "content": "Reverse: 40213"}])
        node = ledger.commit(plan, completion, {"role": "assistant", "content": "31204"})

    `breaks="strict"` raises PrefixBreak where append-only is impossible, "fork" starts a new
    branch. Both count the break in `break_counts` and log it, once; `on_break` receives its key and
    cause. `nbytes` estimates the memory of the session.
    """

    def __init__(self, renderer: Renderer, *, breaks: Breaks = CLIENT_BREAKS) -> None:
        self.renderer = renderer
        self.breaks = check_breaks(breaks)
        self.break_counts: Counter[str] = Counter()
        self.nodes: list[Node] = []
        self.roots: list[Node] = []
        self.nbytes = 0
        self.on_break: Callable[[tuple[bytes, Cause]], object] | None = None
        self.id_json = IdJsonCache()
        self.read_history = ReadHistory()
        self._recorded: set[bytes] = set()

    def plan(self, messages: Iterable[Any], tools: Iterable[Any] | None = None) -> PromptPlan:
        """Return the prompt for these messages.

        Raises BadRequest for messages that cannot be read or add nothing new, and, with
        breaks="strict", PrefixBreak with its cause.
        """
        request = read_request(self.roots, messages, tools)
        return self._settle(find_prompt(request, self.roots, self.renderer), self.breaks)

    async def plan_async(
        self,
        messages: Iterable[Any],
        tools: Iterable[Any] | None = None,
        *,
        renderer: Renderer | None = None,
        breaks: Breaks | None = None,
        lazy: bool = False,
    ) -> PromptPlan:
        """Plan as `plan` does, with large requests off the event loop; raise as it does.

        `renderer` and `breaks` replace the ledger's own for this request. With `lazy` the ids may
        stay JSON (LazyIds), and the messages are as decoded from JSON, for a caller that forwards
        both.
        """
        renderer = renderer or self.renderer
        cached = self.read_history.known(messages) if lazy else UNREAD
        large = is_large_history(messages, tools, len(cached.plain))
        # A copy: turns may be committed while a thread reads, and count from the next plan.
        roots = self.roots[:] if large else self.roots
        request = await off_loop(large, read_request, roots, messages, tools, cached)
        if lazy:
            self.read_history.keep(cached.json, request.messages, request.history)
        plan = light_prompt(request, renderer)
        if plan is None:
            plan = await off_loop(True, find_prompt, request, self.roots[:], renderer)
        return self._settle(plan, breaks or self.breaks, lazy=lazy)

    def plan_ids(self, prompt_ids: Sequence[int], *, breaks: Breaks | None = None) -> PromptPlan:
        """Return where a turn with a prompt of ids belongs: after the longest stored turn it begins
        with.

        Raises PrefixBreak with breaks="strict" if the ids continue a stored prompt with other
        tokens than those sampled there, and BadTokenId for invalid ids.
        """
        try:
            ids = array(IDS, prompt_ids)
        except OverflowError:
            raise BadTokenId("an id of the prompt is beyond 31 bits", param="prompt_ids") from None
        node, claims = longest_by_ids(self.roots, ids)
        before = node.breaks if node is not None else ()
        cause: Cause | None = "edited_history" if claims else None
        if cause is not None:
            # Before raising: a break counts once, whether it is refused or becomes a branch.
            self._record(cause, ids.tobytes(), node)
            if (breaks or self.breaks) == "strict":
                raise PrefixBreak(
                    f"{EXPLAINED[cause]} (the first {node.end if node is not None else 0} of "
                    f"{len(ids)} ids are stored turns); send them unchanged, or allow branches "
                    "with breaks='fork'",
                    cause=cause,
                    param="prompt_ids",
                )
        parent = node if cause is None else None
        return PromptPlan(
            prompt_ids=prompt_ids,
            parent=parent,
            new_messages=(),
            tools=parent.tools if parent is not None else b"",
            cause=cause,
            breaks=before if cause is None else (*before, cause),
            continues=parent is not None and parent.finish == "abort" and parent.end == len(ids),
            by_ids=True,
        )

    def continue_(self, node: Node) -> PromptPlan:
        """Return the prompt that continues an aborted turn token for token.

        Raises Conflict if the turn was not aborted.
        """
        self._check_mine(node)
        if node.finish != "abort":
            raise Conflict(f"turn {node.index} ended with {node.finish!r}, only 'abort' continues")
        partial = list(node.sampled)
        opened = node
        while opened.continues and opened.parent is not None:
            opened = opened.parent
            partial = [*opened.sampled, *partial]
        return PromptPlan(
            prompt_ids=node.ids().tolist(),
            parent=node,
            new_messages=(),
            tools=node.tools,
            breaks=node.breaks,
            continues=True,
            partial=tuple(partial),
        )

    def commit(self, plan: PromptPlan, completion: Completion, message: Any) -> Node:
        """Store the sampled turn with the assistant message (or Reply) that was returned for it.

        Nothing is stored unless everything fits. Raises Misaligned if the completion does not
        belong to this plan's prompt, BadExperts if its rows do not cover the turn.
        """
        (node,) = self.commit_all(plan, [(completion, message)])
        return node

    def commit_all(self, plan: PromptPlan, choices: Iterable[tuple[Completion, Any]]) -> list[Node]:
        """Store the choices of one request as sibling branches: all of them, or none.

        Raises as `commit` does.
        """
        turns = list(choices)
        made = self.make_turns(plan, turns)
        self.add_turns(made)
        return [node for node, _ in made[-len(turns) :]]

    def make_turns(
        self,
        plan: PromptPlan,
        choices: Iterable[tuple[Completion, Any]],
        *,
        before: Sequence[MadeTurn] = (),
    ) -> list[MadeTurn]:
        """Return the turns that `commit_all` would store behind those of `before`, without storing
        them; each with the turn it shares its prompt with. Raises as `commit` does.

        Where the agent continued from a part of a cut turn, that part comes first, once.
        """
        made: list[MadeTurn] = []
        parent, index = plan.parent, len(self.nodes) + len(before)
        if parent is not None:
            self._check_mine(parent)
        if parent is not None and plan.kept_part is not None:
            same = kept_node(parent, plan.kept_part, index)
            others = [*self.siblings(parent.parent), *(node for node, _ in before)]
            parent = next((node for node in others if _is_same_part(node, same)), same)
            if parent is same:
                made.append((same, plan.parent))
        own: list[MadeTurn] = []
        for completion, message in choices:
            turn = index + len(made) + len(own)
            own.append(self._turn(turn, plan, parent, completion, message, own))
        return [*made, *own]

    def add_turns(self, made: Iterable[MadeTurn]) -> None:
        """Store turns in order, skipping those that are stored already."""
        for node, twin in made:
            if node.index >= len(self.nodes):
                self._add(node, twin)

    def extend(
        self, turns: Sequence[bytes], start: int, recorded: Iterable[tuple[bytes, str]]
    ) -> None:
        """Add turns, from number `start` on, and breaks that other gateways have stored meanwhile,
        skipping those already here. Raises BadRequest for invalid turns.
        """
        # The turns were read while requests ran: the first of them may have been added since.
        self.add_turns(codec.load_turns(turns[len(self.nodes) - start :], self.nodes))
        for key, cause in recorded:
            if key not in self._recorded:
                self._recorded.add(key)
                self.break_counts[cause] += 1

    def _turn(
        self,
        index: int,
        plan: PromptPlan,
        parent: Node | None,
        completion: Completion,
        message: Any,
        made: Sequence[MadeTurn],
    ) -> MadeTurn:
        """Return the node of a choice after those already made, and the one it shares its prompt
        with.
        """
        _check_prompt(plan.prompt_ids, completion.prompt_ids)
        stored = message if isinstance(message, Reply) else Reply(message)
        (fields,) = plain_messages([stored.message])
        if fields["role"] != "assistant":
            raise BadRequest(
                f"message.role is {fields['role']!r}, expected 'assistant'", param="message.role"
            )
        reply = canonical(fields)
        start = parent.end if parent is not None else 0
        prompt = array(IDS, plan.prompt_ids[start:])
        # Choices of one request, and requests sent again, have the same prompt: it is stored and
        # held in memory once, with the first of them.
        if made:
            twin: Node | None = made[0][1] or made[0][0]
        else:
            siblings = self.siblings(parent)
            twin = next((sibling for sibling in siblings if _is_twin(sibling, plan, prompt)), None)
        node = Node(
            index=index,
            parent=parent,
            start=start,
            new_messages=twin.new_messages if twin else plan.new_messages,
            reply=reply,
            tools=twin.tools if twin else parent.tools if parent is not None else plan.tools,
            prompt=twin.prompt if twin else prompt,
            sampled=array(IDS, completion.token_ids),
            logprobs=array(LOGPROBS, completion.logprobs),
            versions=completion.versions,
            finish=completion.finish,
            logprob_mode=completion.logprob_mode,
            temperature=completion.temperature,
            worker=completion.worker,
            adapter=completion.adapter,
            request_id=completion.request_id,
            experts=own_experts(parent, completion.experts, start),
            support=completion.support,
            continues=plan.continues,
            after_tool=_after_tool(parent, plan.new_messages),
            thought=reply.reasoning is not None or self.renderer.thinks(completion.token_ids),
            breaks=plan.breaks,
            shaping=completion.shaping,
            stop_reason=completion.stop_reason,
            stop_tokens=completion.stop_tokens or 0,
            tool_parse_error=stored.tool_parse_error,
            by_ids=plan.by_ids,
            notes=msgspec.json.encode(stored.notes) if stored.notes else b"",
            origin=stored.origin,
        )
        return node, twin

    def siblings(self, parent: Node | None) -> list[Node]:
        """Return the turns that follow this one; for None, those that open the session."""
        return parent.children if parent is not None else self.roots

    def samples(
        self,
        *,
        train_aborted: bool = False,
        dedupe: bool = True,
        kinds: Iterable[str] | None = None,
        weights: str | None = None,
    ) -> list[Sample]:
        """Return the samples of every branch, in the order in which the branches ended.

        A branch that mixes logprob modes, temperatures or adapters is split into several samples.
        Tokens of an aborted turn that was not continued are masked, unless `train_aborted`; with
        `dedupe`, so are tokens that an earlier sample trains (`trained_in`). `kinds` selects
        branches by kind, and `weights` sets the weights of samples (see `weighted`). Raises
        BadRequest for unknown kinds and weights.
        """
        return branch_samples(
            self.nodes, train_aborted=train_aborted, dedupe=dedupe, kinds=kinds, weights=weights
        )

    def sample(self, node: Node, *, train_aborted: bool = False) -> Sample:
        """Return the one sample of the branch that ends with this turn, whatever other branches
        train, without its lineage.

        Raises Conflict if the branch mixes logprob modes, temperatures or adapters.
        """
        self._check_mine(node)
        return branch_sample(node.path(), train_aborted=train_aborted)

    @classmethod
    def from_turns(
        cls, turns: Iterable[bytes], recorded: Iterable[tuple[bytes, str]], renderer: Renderer
    ) -> Ledger:
        """Restore a session from turns stored one by one (`codec.dump_turn`) and the breaks of
        `on_break`.

        Raises BadRequest if they are not the turns of a session.
        """
        breaks = list(recorded)
        ledger = cls(renderer)
        ledger._restore(
            codec.load_turns(turns),
            Counter(cause for _, cause in breaks),
            {key for key, _ in breaks},
        )
        return ledger

    def _restore(
        self,
        nodes: Iterable[tuple[Node, Node | None]],
        counts: dict[str, int],
        recorded: set[bytes],
    ) -> None:
        self.break_counts.update(counts)
        self._recorded = recorded
        for node, twin in nodes:
            self._add(node, twin)

    def _add(self, node: Node, twin: Node | None) -> None:
        self.nbytes += cost(node, twin)
        self.nodes.append(node)
        self.siblings(node.parent).append(node)

    def _settle(self, plan: PromptPlan, breaks: Breaks, *, lazy: bool = False) -> PromptPlan:
        """Return the plan with all ids of its prompt; a break is recorded here, on the caller's
        thread. Raises PrefixBreak for one in a strict session.
        """
        if (cause := plan.cause) is not None:
            history = plan.new_messages
            self._record(cause, repr(history).encode(errors="surrogatepass"), plan.matched.node)
            if breaks == "strict":
                raise PrefixBreak(
                    f"{EXPLAINED[cause]} ({plan.matched.length} of {len(history)} messages "
                    "are a stored history); send it unchanged, or allow branches with "
                    "breaks='fork'",
                    cause=cause,
                    param="tools" if cause == "tools_changed" else "messages",
                )
        if (node := plan.parent) is None:
            return plan
        added = as_list(plan.prompt_ids)
        if plan.kept_part is not None:
            ids = node.ids()[: node.sampled_start + plan.kept_part.tokens]
            return replace(plan, prompt_ids=[*ids, *added])
        whole = self.id_json.prompt(node, added) if lazy and added else [*node.ids(), *added]
        return replace(plan, prompt_ids=whole)

    def _record(self, cause: Cause, request: bytes, node: Node | None) -> None:
        """Count and log a break once, however often the same request is retried."""
        basis = f"{cause} {node.index if node is not None else -1} ".encode()
        key = blake2b(basis + request, digest_size=16).digest()
        if key not in self._recorded:
            self._recorded.add(key)
            self.break_counts[cause] += 1
            if self.on_break is not None:
                self.on_break((key, cause))
            log.warning("prefix break: %s: %s", cause, EXPLAINED[cause])

    def _check_mine(self, node: Node) -> None:
        if node.index >= len(self.nodes) or self.nodes[node.index] is not node:
            raise Conflict(f"turn {node.index} is not of this session")


def _check_prompt(planned: Sequence[int], sent: Sequence[int]) -> None:
    if planned is sent or planned == sent:
        return
    pairs = enumerate(zip(planned, sent, strict=False))
    at = next((at for at, (mine, theirs) in pairs if mine != theirs), min(len(planned), len(sent)))
    raise Misaligned(
        f"the completion is of another prompt: {len(planned)} ids were planned and {len(sent)} "
        f"sent, first different at position {at}"
    )


def _is_same_part(node: Node, part: Node) -> bool:
    return node.kept_of == part.kept_of and len(node.sampled) == len(part.sampled)


def _is_twin(node: Node, plan: PromptPlan, prompt: array[int]) -> bool:
    """Return whether the turn belongs to the same request, so that its prompt is kept only once."""
    return (
        node.continues == plan.continues
        and node.by_ids == plan.by_ids
        and node.tools == plan.tools
        and node.prompt == prompt
        and node.new_messages == plan.new_messages
    )


def _after_tool(parent: Node | None, new_messages: Sequence[Message]) -> bool:
    before = parent is not None and parent.after_tool
    return before or any(message.role == "tool" for message in new_messages)
