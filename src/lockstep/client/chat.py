"""One token-exact conversation of any number of turns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lockstep.backends.transport import Transport
from lockstep.client.openings import Openings
from lockstep.client.options import Options
from lockstep.client.turn import Turn
from lockstep.ledger import Breaks, Ledger, Node, PromptPlan, Reply
from lockstep.ledger.branch_sample import check_comparable
from lockstep.ledger.breaks import CLIENT_BREAKS, check_breaks
from lockstep.render import Renderer
from lockstep.tokens import Completion, Sample
from lockstep.tokens.errors import BadRequest, Conflict, ContractError
from lockstep.tokens.lineage import check_kinds, check_weights

TURN_STRIDE = 1 << 20
"""Distance between the seeds of consecutive turns of a conversation."""


class Chat:
    """A conversation with a policy, sampled turn by turn.

        chat = policy.chat(system="You reverse strings.")
        turn = await chat.send("Reverse: 40213")
        sample = chat.sample()

    `messages` is the current history. A call that raises leaves the history and the ledger
    unchanged: a turn is committed whole or not at all.

    Tool calls are parsed if there are `tools`, or `call_tools`: tools the model was trained to call
    that are not in the prompt. Otherwise text that looks like a call stays text.
    """

    def __init__(
        self,
        transport: Transport,
        renderer: Callable[[], Awaitable[Renderer]],
        model: str | None,
        options: Options,
        *,
        messages: Iterable[Any] = (),
        tools: Sequence[Any] | None = None,
        call_tools: Sequence[Any] | None = None,
        breaks: Breaks = CLIENT_BREAKS,
        openings: Openings | None = None,
    ) -> None:
        """Create a conversation; `openings` shares the plans of first prompts between
        conversations.
        """
        self.messages: list[Any] = list(messages)
        self.tools = tools
        self.call_tools = call_tools
        self._breaks = check_breaks(breaks)
        self._ledger: Ledger | None = None
        self._transport = transport
        self._renderer = renderer
        self._model = model
        self._options = options
        self._last: tuple[Turn, Node] | None = None
        self._openings = openings
        self._busy = asyncio.Lock()

    @property
    def ledger(self) -> Ledger:
        """The ledger of the turns so far. Raises Conflict before the first turn."""
        if self._ledger is None:
            raise Conflict("there is nothing in this conversation yet: send a message first")
        return self._ledger

    @property
    def break_counts(self) -> Mapping[str, int]:
        """Number of prefix breaks by cause."""
        return {} if self._ledger is None else self._ledger.break_counts

    async def send(self, message: str | Any | Sequence[Any], **options: Any) -> Turn:
        """Append a user message (or one or more message dicts) and return the sampled turn.

        With breaks="strict", raises PrefixBreak if the prompt cannot be append-only, and Conflict
        if the options do not fit into one sample with the earlier turns.
        """
        return await self._turn(_messages(message), options)

    async def send_tool_results(
        self, results: Mapping[str, Any] | Sequence[Any] | str, **options: Any
    ) -> Turn:
        """Append the results of the last turn's tool calls and return the next turn.

        `results` maps call ids to contents, or lists contents in the order of the calls; a single
        string is the result of a single call. Values other than strings are sent as JSON. Raises
        BadRequest unless every call has exactly one result.
        """
        calls = self._last[0].tool_calls if self._last is not None else ()
        if not calls:
            raise Conflict(
                "the last turn made no tool call that takes a result: go on with `send`, and see "
                "`turn.calls` for calls that could not be read"
            )
        ids = [call.id for call in calls]
        if isinstance(results, str):
            results = [results]
        by_id = dict(results) if isinstance(results, Mapping) else None
        if by_id is None:
            if len(results) != len(ids):
                raise BadRequest(
                    f"{len(results)} results came for {len(ids)} tool calls", param="results"
                )
            by_id = dict(zip(ids, results, strict=True))
        if set(by_id) != set(ids):
            raise BadRequest(
                f"results are for the calls {sorted(by_id)}, expected {sorted(ids)}",
                param="results",
            )
        new = [
            {"role": "tool", "tool_call_id": call.id, "name": call.name,
             "content": _text(by_id[call.id])}
            for call in calls
        ]  # fmt: skip
        return await self._turn(new, options)

    async def continue_(self, **options: Any) -> Turn:
        """Continue an aborted last turn token for token, and return the whole turn.

        Token limits apply to the whole turn unless set here. Raises Conflict if the turn was not
        aborted or is constrained by a grammar.
        """
        if self._last is None:
            raise Conflict("there is no turn to continue: begin with `send`")
        before, node = self._last
        used, sampling = len(before.token_ids), self._options.sampling
        left: dict[str, Any] = {"min_tokens": max(sampling.min_tokens - used, 0)}
        if sampling.max_tokens is not None:
            left["max_tokens"] = sampling.max_tokens - used
        left |= options
        if left.get("max_tokens") == 0:
            raise Conflict(f"the turn has used all of its {sampling.max_tokens} tokens already")
        merged = self._options.with_(**left)
        if merged.sampling.grammar is not None:
            # The engine would restart the grammar in the middle of the text it constrains.
            raise Conflict("a turn that is held to a grammar cannot be continued: send it again")
        async with self._alone():
            turn = await self._sample(self.ledger.continue_(node), merged)
            self.messages[-1] = turn.message
            return turn

    def sample(self, *, train_aborted: bool = False) -> Sample:
        """Return the sample to train on: the branch that ends with the last turn.

        Tokens of an aborted turn that was not continued are masked, unless `train_aborted`. Raises
        Conflict before the first turn, and for turns whose logprobs are not comparable.
        """
        if self._last is None:
            raise Conflict("there is nothing to learn from yet: send a message first")
        return self.ledger.sample(self._last[1], train_aborted=train_aborted)

    def samples(
        self,
        *,
        train_aborted: bool = False,
        dedupe: bool = True,
        kinds: Iterable[str] | None = None,
        weights: str | None = None,
    ) -> list[Sample]:
        """Return the samples of every branch; there are several only with breaks="fork".

        With `dedupe`, a token is trained in only one of them; `kinds` selects branches by kind, and
        `weights` sets the weight of each sample; see Ledger.samples. Raises BadRequest for unknown
        kinds and weights.
        """
        if self._ledger is None:
            check_kinds(kinds)
            check_weights(weights)
            return []
        return self._ledger.samples(
            train_aborted=train_aborted, dedupe=dedupe, kinds=kinds, weights=weights
        )

    async def _turn(self, new: list[Any], options: dict[str, Any]) -> Turn:
        merged = self._options.with_(**options)
        if merged.sampling.n != 1:
            raise BadRequest("n must be 1 in a conversation: use policy.generate", param="n")
        async with self._alone():
            messages = [*self.messages, *new]
            ledger = await self._open()
            if self._openings is not None and not ledger.nodes:
                plan = await self._openings.plan(ledger, messages, self.tools)
            else:
                plan = await ledger.plan_async(messages, self.tools)
            if self._breaks == "strict":
                mode, temperature = merged.sampling.logprob_mode, merged.sampling.temperature
                check_comparable(plan.parent, temperature=temperature, logprob_mode=mode)
            turn = await self._sample(plan, self._seeded(merged))
            self.messages = [*messages, turn.message]
            return turn

    async def _open(self) -> Ledger:
        if self._ledger is None:
            self._ledger = Ledger(await self._renderer(), breaks=self._breaks)
        return self._ledger

    async def _sample(self, plan: PromptPlan, options: Options) -> Turn:
        renderer = self.ledger.renderer
        request = options.request(plan.prompt_ids, self._model, renderer.stop_token_ids)
        completion = _only(await self._transport.generate(request))
        ids = [*plan.partial, *completion.token_ids]
        opened = plan.prompt_ids[: len(plan.prompt_ids) - len(plan.partial)]
        tools = self.tools if self.call_tools is None else self.call_tools
        # The tokens sampled before an abort belong to this message, not to its prompt.
        parsed = await renderer.parse_async(
            ids, tools, prompt_ids=opened, stop=completion.stop_reason
        )
        turn = Turn.of(plan, parsed, completion)
        node = self.ledger.commit(plan, completion, Reply(turn.message, parsed.tool_parse_error))
        self._last = turn, node
        return turn

    def _seeded(self, options: Options) -> Options:
        """Return options with a separate seed for this turn: the same seed would repeat the same
        draws.

        Seeds of turns are far apart because other conversations use the seeds next to this one's.
        """
        seed = options.sampling.seed
        if seed is None or not self.ledger.nodes:
            return options
        return Options(
            replace(options.sampling, seed=seed + len(self.ledger.nodes) * TURN_STRIDE),
            options.sending,
        )

    def _alone(self) -> asyncio.Lock:
        if self._busy.locked():
            raise Conflict("this conversation is waiting for a completion: one turn at a time")
        return self._busy


def _messages(message: Any) -> list[Any]:
    if isinstance(message, str):
        return [{"role": "user", "content": message}]
    if isinstance(message, Sequence) and not isinstance(message, (str, bytes)):
        if not message:
            raise BadRequest("message is empty: give a string or a message", param="message")
        return list(message)
    return [message]


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _only(completions: list[Completion]) -> Completion:
    if len(completions) != 1:
        raise ContractError(f"one choice was requested, {len(completions)} came")
    return completions[0]
