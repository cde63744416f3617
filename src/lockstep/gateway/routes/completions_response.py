"""Writes what POST /v1/completions answers, whole or in chunks that add up to the whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from time import time

from lockstep.fleet.routing.affinity import Affinity
from lockstep.gateway.routes.token_text import CompletionText, TokenSpelling
from lockstep.http import sse
from lockstep.protocol.common.lazy_ids import as_list
from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.common.response import StreamDelta
from lockstep.protocol.openai.completions import (
    ID_PREFIX,
    CompletionChoice,
    CompletionRequest,
    CompletionResponse,
)
from lockstep.protocol.vllm.generate_response import experts_field, usage_of
from lockstep.tokens import Completion
from lockstep.tokens.errors import ContractError

Items = AsyncGenerator[StreamDelta | Completion, None]


@dataclass(frozen=True, slots=True)
class CompletionPrompt:
    """One prompt of a request: its text if it came as text, its ask, and where that is sent.

    `first` is the index of its first choice.
    """

    text: str | None
    ask: GenerateRequest
    route: Affinity
    first: int


class CompletionWriter:
    """Writes the answer of one request, whole or in chunks."""

    def __init__(
        self,
        asked: CompletionRequest,
        model: str,
        spelling: TokenSpelling,
        prompts: Sequence[CompletionPrompt],
        chosen: str,
    ) -> None:
        self._asked = asked
        self._spelling = spelling
        self._prompts = prompts
        self._model = model
        self._id = ID_PREFIX + chosen.removeprefix(ID_PREFIX)
        self._created = int(time())

    def whole(self, done: Sequence[Sequence[Completion]]) -> CompletionResponse:
        choices = [
            self._choice(prompt, each, CompletionText(self._spelling))
            for prompt, completions in zip(self._prompts, done, strict=True)
            for each in completions
        ]
        sampled = 0 if self._asked.scores else sum(len(e.token_ids) for each in done for e in each)
        return self._answer(choices, sampled)

    def _choice(
        self,
        prompt: CompletionPrompt,
        done: Completion,
        text: CompletionText,
        sent: int | None = None,
    ) -> CompletionChoice:
        """A finished choice; of a stream, what comes after `sent` tokens."""
        asked = self._asked
        at = sent or 0
        if asked.echo and sent is None:
            self._echo(prompt, done, text)
        ids = [] if asked.scores else done.token_ids[at:]
        if not asked.scores:
            tops = done.top_logprobs[at:] if asked.logprobs and done.top_logprobs else None
            text.add(ids, done.logprobs[at:], tops)
        said, logprobs = text.take(last=True)
        start = sent is None and asked.return_token_ids
        return CompletionChoice(
            index=prompt.first + done.index,
            text=said,
            logprobs=logprobs if asked.logprobs is not None else None,
            finish_reason="length" if asked.scores else done.finish,
            stop_reason=None if asked.scores else done.stop_token,
            token_ids=ids if asked.return_token_ids else None,
            prompt_logprobs=self._spelling.prompt_field(done.prompt_logprobs),
            prompt_token_ids=as_list(done.prompt_ids) if start else None,
            routed_experts=experts_field(done.experts, asked.routed_experts_format),
            weight_versions=None if asked.scores else done.versions,
            scored_version=done.versions[0].version if asked.scores and done.versions else None,
            logprob_mode=done.logprob_mode,
            temperature=done.temperature,
            worker=done.worker,
            adapter=done.adapter,
        )

    def _echo(
        self, prompt: CompletionPrompt, done: Completion | None, text: CompletionText
    ) -> None:
        ids = prompt.ask.prompt_ids
        scored = done.prompt_logprobs if done is not None else None
        text.add_prompt(ids, self._spelling.prompt_data(ids, prompt.text), scored)

    async def events(self, items: Sequence[Items]) -> AsyncGenerator[bytes, None]:
        """The chunks of all choices as they come.

        Alternatives and prompt logprobs come with the finished choice only: a request for them
        gets each choice in one chunk.
        """
        asked = self._asked
        held = bool(asked.logprobs) or asked.prompt_tops is not None or asked.scores
        texts: dict[int, CompletionText] = {}
        sent: dict[int, int] = {}
        tokens = 0
        async with aclosing(merged(items)) as came:
            async for at, item in came:
                prompt = self._prompts[at]
                index = prompt.first + item.index
                text = texts.setdefault(index, CompletionText(self._spelling))
                if isinstance(item, Completion):
                    tokens += 0 if asked.scores else len(item.token_ids)
                    yield self._event(self._choice(prompt, item, text, sent.get(index)))
                elif not held and item.token_ids:
                    yield self._event(self._chunk(prompt, item, text, index not in sent))
                    sent[index] = sent.get(index, 0) + len(item.token_ids)
        if asked.include_usage:
            yield sse.event(self._answer([], tokens))

    def _chunk(
        self, prompt: CompletionPrompt, delta: StreamDelta, text: CompletionText, first: bool
    ) -> CompletionChoice:
        asked = self._asked
        if first and asked.echo:
            self._echo(prompt, None, text)
        if len(delta.logprobs) != len(delta.token_ids):
            raise ContractError(
                f"the stream brought {len(delta.token_ids)} tokens with {len(delta.logprobs)} "
                "logprobs"
            )
        text.add(delta.token_ids, delta.logprobs)
        said, logprobs = text.take()
        return CompletionChoice(
            index=prompt.first + delta.index,
            text=said,
            logprobs=logprobs if asked.logprobs is not None else None,
            token_ids=delta.token_ids if asked.return_token_ids else None,
            prompt_token_ids=(
                as_list(prompt.ask.prompt_ids) if first and asked.return_token_ids else None
            ),
        )

    def _event(self, choice: CompletionChoice) -> bytes:
        return sse.event(self._answer([choice], None))

    def _answer(self, choices: list[CompletionChoice], sampled: int | None) -> CompletionResponse:
        asked = sum(len(prompt.ask.prompt_ids) for prompt in self._prompts)
        return CompletionResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=None if sampled is None else usage_of(asked, sampled),
        )


async def merged(
    items: Sequence[Items],
) -> AsyncGenerator[tuple[int, StreamDelta | Completion], None]:
    """What several streams bring, as it comes; an error of one ends all.

    A stream goes on when what it brought was taken, so that a slow client slows the workers
    instead of filling this process.
    """
    queue: asyncio.Queue[tuple[int, StreamDelta | Completion] | BaseException | None] = (
        asyncio.Queue()
    )
    taken = [asyncio.Semaphore(0) for _ in items]

    async def follow(at: int, each: Items) -> None:
        try:
            async with aclosing(each):
                async for item in each:
                    queue.put_nowait((at, item))
                    await taken[at].acquire()
            queue.put_nowait(None)
        except BaseException as error:
            queue.put_nowait(error)
            raise

    tasks = [asyncio.create_task(follow(at, each)) for at, each in enumerate(items)]
    going = len(tasks)
    try:
        while going:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                going -= 1
            else:
                yield item
                taken[item[0]].release()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
