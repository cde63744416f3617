"""Builds the response of POST /v1/completions, whole or in chunks that add up to it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from time import time

from lockstep.backends.merge_streams import merge_streams
from lockstep.fleet.routing.affinity import Affinity
from lockstep.gateway.routes.token_text import CompletionText, TokenSpelling
from lockstep.gateway.turn.token_turn import TokenTurn
from lockstep.http import sse
from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.common.response import StreamDelta, usage_of
from lockstep.protocol.common.sampling_mask import support_field
from lockstep.protocol.json.lazy_ids import as_list
from lockstep.protocol.openai.completions import (
    ID_PREFIX,
    CompletionChoice,
    CompletionRequest,
    CompletionResponse,
)
from lockstep.protocol.vllm.generate_response import experts_field, stop_reason_of
from lockstep.tokens import Completion
from lockstep.tokens.errors import ContractError

Items = AsyncGenerator[StreamDelta | Completion, None]


@dataclass(frozen=True, slots=True)
class CompletionPrompt:
    """One prompt of a request: its text, if it was sent as text, and the request for the worker.

    `first` is the index of its first choice; `turn` stores it in a session.
    """

    text: str | None
    request: GenerateRequest
    affinity: Affinity
    first: int
    turn: TokenTurn | None = None


class CompletionWriter:
    """Builds the response of one request, whole or in chunks."""

    def __init__(
        self,
        body: CompletionRequest,
        model: str,
        spelling: TokenSpelling,
        prompts: Sequence[CompletionPrompt],
        client_id: str,
    ) -> None:
        self._body = body
        self._spelling = spelling
        self._prompts = prompts
        self._model = model
        self._id = ID_PREFIX + client_id.removeprefix(ID_PREFIX)
        self._created = int(time())

    def whole(self, completions: Sequence[Sequence[Completion]]) -> CompletionResponse:
        """Return the response for the completions of each prompt."""
        choices = [
            self._choice(prompt, completion, self._text(prompt))
            for prompt, of_prompt in zip(self._prompts, completions, strict=True)
            for completion in of_prompt
        ]
        sampled = sum(
            len(completion.token_ids) for of_prompt in completions for completion in of_prompt
        )
        return self._response(choices, 0 if self._body.scores else sampled)

    def _choice(
        self,
        prompt: CompletionPrompt,
        completion: Completion,
        text: CompletionText,
        sent: int | None = None,
    ) -> CompletionChoice:
        """Return a finished choice; in a stream, the part after `sent` tokens."""
        body = self._body
        at = sent or 0
        if body.echo and sent is None:
            self._echo(prompt, completion, text)
        ids = [] if body.scores else completion.token_ids[at:]
        if not body.scores:
            tops = completion.top_logprobs if body.logprobs else None
            text.add(ids, completion.logprobs[at:], tops[at:] if tops else None)
        new_text, logprobs = text.end(completion.stop_reason)
        start, versions = sent is None and body.return_token_ids, completion.versions
        return CompletionChoice(
            index=prompt.first + completion.index,
            text=new_text,
            logprobs=logprobs if body.logprobs is not None else None,
            finish_reason="length" if body.scores else completion.finish,
            stop_reason=None if body.scores else stop_reason_of(completion),
            token_ids=ids if body.return_token_ids else None,
            prompt_logprobs=self._spelling.prompt_field(completion.prompt_logprobs),
            prompt_token_ids=as_list(completion.prompt_ids) if start else None,
            routed_experts=experts_field(completion.experts, body.routed_experts_format),
            sampling_mask=support_field(
                completion.support, "lists" if body.return_sampling_mask else None
            ),
            weight_versions=None if body.scores else versions,
            scored_version=versions[0].version if body.scores and versions else None,
            logprob_mode=completion.logprob_mode,
            temperature=completion.temperature,
            worker=completion.worker,
            adapter=completion.adapter,
        )

    def _text(self, prompt: CompletionPrompt) -> CompletionText:
        return CompletionText(
            self._spelling,
            prompt.request.sampling.stop,
            include_stop=bool(self._body.include_stop_str_in_output),
        )

    def _echo(
        self, prompt: CompletionPrompt, completion: Completion | None, text: CompletionText
    ) -> None:
        ids = prompt.request.prompt_ids
        scored = completion.prompt_logprobs if completion is not None else None
        text.add_prompt(ids, self._spelling.prompt_data(ids, prompt.text), scored)

    async def events(self, items: Sequence[Items]) -> AsyncGenerator[bytes, None]:
        """Yield the chunks of all choices as they arrive.

        Workers send alternatives and prompt logprobs with the finished choice only: a request for
        them gets each choice in one chunk.
        """
        body = self._body
        in_one_chunk = bool(body.logprobs) or body.prompt_tops is not None or body.scores
        texts: dict[int, CompletionText] = {}
        sent: dict[int, int] = {}
        tokens = 0
        # Prompts are sampled side by side: chunks are sent in the order of their arrival.
        async with aclosing(merge_streams(items)) as arrivals:
            async for at, item in arrivals:
                prompt = self._prompts[at]
                index = prompt.first + item.index
                text = texts.get(index) or texts.setdefault(index, self._text(prompt))
                if isinstance(item, Completion):
                    if prompt.turn is not None:
                        await prompt.turn.commit([item])
                    tokens += 0 if body.scores else len(item.token_ids)
                    yield self._event(self._choice(prompt, item, text, sent.get(index)))
                elif not in_one_chunk and item.token_ids:
                    yield self._event(self._chunk(prompt, item, text, index not in sent))
                    sent[index] = sent.get(index, 0) + len(item.token_ids)
        if body.include_usage:
            yield sse.event(self._response([], tokens))

    def _chunk(
        self, prompt: CompletionPrompt, delta: StreamDelta, text: CompletionText, first: bool
    ) -> CompletionChoice:
        body = self._body
        if first and body.echo:
            self._echo(prompt, None, text)
        if len(delta.logprobs) != len(delta.token_ids):
            raise ContractError(
                f"the worker's stream has {len(delta.token_ids)} tokens with {len(delta.logprobs)} "
                "logprobs: expected one for each"
            )
        text.add(delta.token_ids, delta.logprobs)
        new_text, logprobs = text.take()
        return CompletionChoice(
            index=prompt.first + delta.index,
            text=new_text,
            logprobs=logprobs if body.logprobs is not None else None,
            token_ids=delta.token_ids if body.return_token_ids else None,
            prompt_token_ids=(
                as_list(prompt.request.prompt_ids) if first and body.return_token_ids else None
            ),
        )

    def _event(self, choice: CompletionChoice) -> bytes:
        return sse.event(self._response([choice], None))

    def _response(self, choices: list[CompletionChoice], sampled: int | None) -> CompletionResponse:
        prompt_tokens = sum(len(prompt.request.prompt_ids) for prompt in self._prompts)
        return CompletionResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=None if sampled is None else usage_of(prompt_tokens, sampled),
        )
