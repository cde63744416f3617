"""A policy behind a URL: generate, chat and score, for one or many prompts."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, overload

from lockstep.backends.registry import open_transport
from lockstep.backends.transport import ModelCard, StreamDelta, Transport, TransportName
from lockstep.client.chat import Chat
from lockstep.client.openings import Openings
from lockstep.client.options import Options
from lockstep.client.tokenizer import TokenizerSource
from lockstep.client.turn import Scores, Turn
from lockstep.ledger import Breaks, PromptPlan
from lockstep.ledger.breaks import CLIENT_BREAKS
from lockstep.models import model_directory
from lockstep.progress import Progress
from lockstep.render import Renderer, Thinking
from lockstep.tokens import Completion, LockstepError, Shaping
from lockstep.tokens.errors import BadRequest, Conflict, ContractError

Prompt = str | Sequence[int] | Sequence[Any]
PLAIN: dict[str, Any] = {
    "n": 1, "max_tokens": 1, "min_tokens": 0, "stop": (), "logprobs": 0, "prompt_logprobs": 0,
    **{field.name: field.default for field in fields(Shaping) if field.name not in ("end_ids",)},
}  # fmt: skip
"""Options of a scoring request: no option shapes the distribution unless the call sets it."""
OPENED = (
    "write `async with lockstep.connect(url) as policy:`, or without async "
    "`with lockstep.connect_sync(url) as policy:`"
)


class Policy:
    """A served model, created by `lockstep.connect`; options set there apply to every call.

        async with lockstep.connect("http://127.0.0.1:8000", model="tiny") as policy:
            (turn,) = await policy.generate("Reverse: 40213", max_tokens=8)

    Its calls raise subclasses of LockstepError.
    """

    def __init__(
        self,
        transport: Transport,
        model: str | None,
        tokenizer: TokenizerSource,
        options: Options,
        *,
        url: str = "",
        api_key: str | None = None,
        openings: Openings | None = None,
    ) -> None:
        self.url = url
        self.api_key = api_key
        self.transport = transport
        self.model = model
        self._tokenizer = tokenizer
        self._options = options
        self._openings = openings

    def over(self, transport: Transport, openings: Openings | None = None) -> Policy:
        """Return this policy with another transport and with a shared cache of first prompts."""
        return Policy(
            transport, self.model, self._tokenizer, self._options,
            url=self.url, api_key=self.api_key, openings=openings,
        )  # fmt: skip

    def renderer(self, thinking: Thinking = "keep") -> Renderer:
        """The model's renderer, created once. Raises UnknownModel without a tokenizer.

        Blocks until the tokenizer is loaded: on an event loop, call it in a thread.
        """
        return self._tokenizer.get(thinking)

    @overload
    async def generate(self, prompt: Sequence[int], **options: Any) -> list[Completion]: ...
    @overload
    async def generate(
        self, prompt: str | Sequence[Any], *, tools: Sequence[Any] | None = None, **options: Any
    ) -> list[Turn]: ...
    async def generate(
        self, prompt: Prompt, *, tools: Sequence[Any] | None = None, **options: Any
    ) -> list[Completion] | list[Turn]:
        """Sample once: token ids return completions, messages (or a string) return turns.

        With n > 1, return n results in the order of their index.
        """
        merged = self._options.with_(**options)
        if _is_ids(prompt):
            return await self.transport.generate(merged.request(list(prompt), self.model))  # type: ignore[arg-type]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        renderer = await self._tokenizer.get_async("keep")
        ids = await renderer.render_async(messages, tools)
        request = merged.request(ids, self.model, renderer.stop_token_ids)
        plan = PromptPlan(prompt_ids=ids, parent=None, new_messages=(), tools=b"")
        turns = []
        for completion in await self.transport.generate(request):
            parsed = await renderer.parse_async(
                completion.token_ids, tools, prompt_ids=ids, stop=completion.stop_reason
            )
            turns.append(Turn.of(plan, parsed, completion))
        return turns

    def stream(
        self, prompt_ids: list[int], **options: Any
    ) -> AsyncIterator[StreamDelta | Completion]:
        """Yield deltas as they arrive, then the completions that `generate` would return."""
        request = self._options.with_(**options).request(prompt_ids, self.model)
        return self.transport.stream(request)

    def chat(
        self,
        *,
        system: str | None = None,
        messages: Iterable[Any] = (),
        tools: Sequence[Any] | None = None,
        call_tools: Sequence[Any] | None = None,
        breaks: Breaks = CLIENT_BREAKS,
        thinking: Thinking = "keep",
        **options: Any,
    ) -> Chat:
        """Start a conversation; `messages` open it, and `options` apply to all its turns.

        `tools` are put into the prompt, and their calls are parsed out of completions; `call_tools`
        are only parsed: tools that the model was trained to call without their schema. The first
        turn loads the tokenizer and raises UnknownModel if there is none.
        """
        opening = [] if system is None else [{"role": "system", "content": system}]
        return Chat(
            self.transport,
            functools.partial(self._tokenizer.get_async, thinking),
            self.model,
            self._options.with_(**options),
            messages=[*opening, *messages],
            tools=tools,
            call_tools=call_tools,
            breaks=breaks,
            openings=self._openings,
        )

    async def score(
        self,
        token_ids: Sequence[int],
        *,
        temperature: float = 1.0,
        start: int | None = None,
        top: int = 0,
        **options: Any,
    ) -> Scores:
        """Return the logprob of every token given the tokens before it, e.g. for distillation.

        With `start`, tokens from there on are scored as if sampled with these options (top_p,
        penalties and the like): their processed logprobs. A token that could not have been drawn
        raises BadLogprob, or is -inf with `allow_nonfinite`. With `top`, the scores have that many
        likeliest tokens in the place of each token, or one more.

        Raises Conflict if a temperature other than 1 is requested from a server that reports raw
        logprobs, BadRequest for a single token, and PromptTooLong if the context cannot hold the
        tokens. Engines other than Lockstep's need room for one more.
        """
        if len(token_ids) < 2:
            raise BadRequest(
                f"token_ids has {len(token_ids)} ids: the first has no logprob, so give 2 or more",
                param="token_ids",
            )
        processed = temperature != 1.0 or start is not None
        mode = {"logprob_mode": "processed"} if processed else {}
        # The tokens sampled after the scored ones are discarded, so request as few as possible.
        shortest = {"max_tokens": max(1, options.get("min_tokens", 0))}
        scoring = {
            "temperature": temperature, "score_start": start, "prompt_logprobs": top,
            **mode, **shortest,
        }  # fmt: skip
        merged = self._options.with_(**PLAIN).with_(**scoring | options)
        (completion,) = await self.transport.generate(merged.request(list(token_ids), self.model))
        if temperature != 1.0 and completion.logprob_mode == "raw":
            raise Conflict(
                f"scores at temperature {temperature} were requested, but this server reports raw "
                "logprobs: start it with processed logprobs, or score at temperature 1",
                param="temperature",
            )
        if completion.prompt_logprobs is None:
            raise ContractError("prompt logprobs were requested and did not come")
        logprobs = [0.0 if entry is None else entry.logprob for entry in completion.prompt_logprobs]
        version = completion.versions[0].version if completion.versions else ""
        tops = [() if entry is None else entry.top for entry in completion.prompt_logprobs]
        return Scores(list(token_ids), logprobs, version, temperature, tops if top else None)

    async def map(
        self,
        prompts: Iterable[Prompt],
        *,
        concurrency: int = 64,
        progress: bool = False,
        keep_errors: bool = False,
        **options: Any,
    ) -> list[Any]:
        """Run `generate` for many prompts and return the results in order.

        The first error cancels the rest and is raised; with `keep_errors` it takes its result's
        place.
        """
        if concurrency < 1:
            raise BadRequest(f"concurrency is {concurrency}: expected >= 1", param="concurrency")
        every = list(prompts)
        results: list[Any] = [None] * len(every)
        limit = asyncio.Semaphore(concurrency)

        async def one(at: int, step: Callable[[], None]) -> None:
            async with limit:
                try:
                    results[at] = await self.generate(every[at], **options)
                except LockstepError as error:
                    if not keep_errors:
                        raise
                    results[at] = error
            step()

        with Progress("Generating", len(every), visible=progress) as bar:
            try:
                async with asyncio.TaskGroup() as group:
                    for at in range(len(every)):
                        group.create_task(one(at, bar.advance))
            except* LockstepError as failed:
                raise failed.exceptions[0] from None
        return results

    async def models(self) -> list[ModelCard]:
        """Return the cards of the models that the server serves now."""
        return await self.transport.models()

    async def close(self) -> None:
        await self.transport.close()


class PolicyContext(contextlib.AbstractAsyncContextManager[Policy]):
    """Async context manager returned by `connect`: opens the policy and closes it."""

    def __init__(self, opening: contextlib.AbstractAsyncContextManager[Policy]) -> None:
        self._opening = opening

    async def __aenter__(self) -> Policy:
        return await self._opening.__aenter__()

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._opening.__aexit__(*error)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name!r} before a connection is open: {OPENED}")

    def __await__(self) -> Any:
        raise TypeError(f"a connection is not awaited: {OPENED}")


def connect(
    url: str,
    model: str | None = None,
    *,
    tokenizer: str | Path | Any | None = None,
    transport: TransportName | None = None,
    api_key: str | None = None,
    timeout: float = 1800.0,
    retries: int = 2,
    **options: Any,
) -> PolicyContext:
    """Connect to a policy at `url`; the server's dialect is detected unless `transport` is set.

        async with lockstep.connect("http://127.0.0.1:8000", model="tiny") as policy:
            chat = policy.chat()

    `model` defaults to the only one served. `tokenizer` is a directory, a hub name or a tokenizer
    object; the default is the model's own, which is bundled, a directory on this machine, or on the
    Hub under its name. Calls with token ids need no tokenizer. `options` apply to every call.
    Raises Unavailable without a server.
    """

    @contextlib.asynccontextmanager
    async def opening() -> AsyncIterator[Policy]:
        settings = Options().with_(**options)
        opened = await open_transport(
            url, transport, api_key=api_key, timeout=timeout, retries=retries
        )
        try:
            name = model or await _only_model(opened)
            tokenizer_source = tokenizer
            if tokenizer_source is None:
                tokenizer_source = name if model is None else await _tokenizer_name(opened, model)
            source = TokenizerSource(tokenizer_source)
            yield Policy(opened, name, source, settings, url=url, api_key=api_key)
        finally:
            await opened.close()

    return PolicyContext(opening())


async def generate(url: str, prompt: Prompt, model: str | None = None, **options: Any) -> Any:
    """Connect, call `Policy.generate` once, and close. Accepts the options of both.

        (turn,) = await lockstep.generate("http://127.0.0.1:8000", "Reverse: 40213", max_tokens=8)

    Use `connect` for more than one call: it keeps connections and the tokenizer.
    """
    opening = ("tokenizer", "transport", "api_key", "retries")
    first = {name: options.pop(name) for name in opening if name in options}
    async with connect(url, model, **first) as policy:
        return await policy.generate(prompt, **options)


async def _only_model(transport: Transport) -> str:
    bases = [card.id for card in await transport.models() if card.parent is None]
    if len(bases) != 1:
        raise BadRequest(
            f"the server has {len(bases)} models ({', '.join(bases)}): name one with model=",
            param="model",
        )
    return bases[0]


async def _tokenizer_name(transport: Transport, model: str) -> str:
    """Return the name of a model's tokenizer: the base model's for an adapter or an unknown name.

    For an unknown name, the server then rejects the request, and the Hub is not searched for it.
    """
    if model_directory(model).is_dir():
        return model
    try:
        cards = await transport.models()
    except LockstepError:
        return model
    parents = {card.id: card.parent for card in cards}
    if model in parents:
        return parents[model] or model
    bases = [name for name, parent in parents.items() if parent is None]
    return bases[0] if len(bases) == 1 else model


def _is_ids(prompt: Any) -> bool:
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], int)
