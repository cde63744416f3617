"""A gateway for a synchronous trainer: its policy, and its fleet to publish weights to."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import lockstep
from lockstep.backends.admin import PauseMode
from lockstep.client.chat import Chat
from lockstep.client.policy import Policy, connect
from lockstep.client.sync import LoopThread
from lockstep.client.turn import Scores
from lockstep.tokens import Completion, Sample
from lockstep.tokens.errors import Conflict, LockstepError, Unavailable, VersionUnavailable
from lockstep.train.publish import Published, Publisher
from lockstep.train.records.chain_recorder import model_files
from lockstep.train.records.partial_chain import Drawn, PartialChain, published_links
from lockstep.train.retry import RetryPolicy

T = TypeVar("T")
Save = Callable[[Path, str], Any]
"""Writes a checkpoint into a directory, with the version in its probe."""
KEEP_CHECKPOINTS = 2
"""Checkpoints on disk: the served one, which a restarted worker loads, and the previous one, to
which an update may be rolled back."""


class ServedPolicy:
    """The policy behind a gateway and the fleet that serves it, with blocking calls.

        policy = ServedPolicy(checkpoints="checkpoints")

    `model` defaults to the only served one, admin URL and token to those of the gateway on this
    machine. Weights for the fleet are written to `checkpoints`, which must be inside the gateway's
    --checkpoint-root if it has one. Transient errors (a worker restarts, a queue is full) are
    retried for `retry_seconds`.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        model: str | None = None,
        *,
        checkpoints: str | Path,
        admin_url: str | None = None,
        admin_token: str | None = None,
        api_key: str | None = None,
        tokenizer: Any = None,
        adapter: str | None = None,
        update_mode: PauseMode = "keep",
        retry_seconds: float = 300.0,
    ) -> None:
        self.url = url
        self.model = model
        self.checkpoints = Path(checkpoints).absolute()
        self.adapter = adapter
        self.retry = RetryPolicy(retry_seconds)
        self.published: Published | None = None
        self._admin = admin_url, admin_token
        self._connecting = {"api_key": api_key, "tokenizer": tokenizer}
        self._mode = update_mode
        self._count = 0
        self._written: list[Path] = []
        self._run_directory: Path | None = None
        self._publisher: Publisher | None = None
        self._chain: PartialChain | None = None
        self._described: tuple[Mapping[str, Any], str | None] = ({}, None)
        self._samples_all = True
        self._thread: LoopThread | None = None

    # Opening and closing

    def open(self, *, tokenizer: Any = None, publishes: bool = True) -> None:
        """Connect, once. `tokenizer` is used if the constructor got none.

        Raises Unavailable without a gateway, and BadRequest without the admin token to publish.
        """
        if self._thread is not None:
            return
        self._thread, self._stack = LoopThread(), AsyncExitStack()
        try:
            self.run(self._open(tokenizer, publishes))
        except BaseException:
            self.close()
            raise

    async def _open(self, tokenizer: Any, publishes: bool) -> None:
        self.policy: Policy = await self._stack.enter_async_context(
            connect(
                self.url,
                self.adapter or self.model,
                tokenizer=self._connecting["tokenizer"] or tokenizer,
                api_key=self._connecting["api_key"],
            )
        )
        if publishes:
            url, token = self._admin
            fleet = await self._stack.enter_async_context(lockstep.connect_fleet(url, token=token))
            self._publisher = Publisher(fleet, self.retry, adapter=self.adapter, mode=self._mode)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the event loop of the connection and return its result."""
        if self._thread is None:
            work.close()
            raise Conflict("this policy is not connected: call open() first")
        return self._thread.run(work)

    def close(self) -> None:
        """Close the connections. May be called twice."""
        if self._thread is not None:
            self.run(self._stack.aclose())
            self._thread.stop()
            self._thread = None

    def describe(self, config: Mapping[str, Any], model: str | None, *, samples_all: bool) -> None:
        """Name the configuration and the model of the trainer, for the first record of its chain.

        Without `samples_all`, other ranks sample as well, so that no step's samples are known here.
        """
        self._described, self._samples_all = (config, model), samples_all

    # Weights

    def publish(self, save: Save) -> Published:
        """Publish the checkpoint that `save` writes. Raises what `Publisher.publish` raises."""
        directory = self.next_checkpoint()
        save(directory, directory.name)
        return self.publish_saved(directory)

    def next_checkpoint(self) -> Path:
        """Return the directory for the next checkpoint, whose name is the version."""
        if self._publisher is None:
            raise Conflict("this policy is not connected to a control plane: call open() first")
        step = self._count
        self._count += 1  # also if this fails: a retry writes another directory
        return self._new_directory(step)

    def publish_saved(self, directory: Path) -> Published:
        """Publish the checkpoint in a directory of `next_checkpoint`. Raises what
        `Publisher.publish` raises.
        """
        if self._publisher is None:
            raise Conflict("this policy is not connected to a control plane: call open() first")
        step = int(directory.name.removeprefix("step-"))
        self.published = self.run(self._publisher.publish(directory, step))
        self._record(self.published)
        for old in self._written[:-KEEP_CHECKPOINTS]:
            shutil.rmtree(old, ignore_errors=True)
        del self._written[:-KEEP_CHECKPOINTS]
        return self.published

    def _record(self, published: Published) -> None:
        """Write the record of a step: the weights, their proofs, and what was sampled for it.

        The trainer's rewards, batches and gradients are not known here.
        """
        if self._chain is None:
            self._chain = PartialChain(published.directory.parent, "trl")
            config, model = self._described
            files = model_files(model) if model and Path(model).is_dir() else {}
            self._chain.start(config, files, updates=published_links(published)["updates"])
        else:
            self._chain.step(published.step, **published_links(published))

    def _drawn(self, sequences: Sequence[Drawn]) -> None:
        if self._chain is not None and self._samples_all:
            self._chain.add(sequences)

    def _new_directory(self, step: int) -> Path:
        """Return a new directory, in one per run: a killed run leaves its checkpoints behind."""
        if self._run_directory is None:
            numbers = itertools.count()
            self._run_directory = next(
                path
                for number in numbers
                if not (path := self.checkpoints / f"run-{number}").exists()
            )
        directory = self._run_directory / f"step-{step}"
        if directory not in self._written:
            self._written.append(directory)
        return directory

    # Samples

    def version_pin(self) -> dict[str, Any]:
        """Return the option that makes requests require the published weights.

        Empty for an adapter, whose requests name it instead.
        """
        if self.published is None or self.adapter is not None:
            return {}
        return {"weight_version": self.published.label}

    async def complete(self, prompt_ids: list[int], n: int, **options: Any) -> list[Completion]:
        """Return `n` completions of a prompt. Aborted ones are sampled again.

        Raises Conflict for logprobs that a trainer at this temperature cannot use.
        """

        async def attempt(_: int) -> list[Completion]:
            completions: list[Completion] = await self.policy.generate(prompt_ids, n=n, **options)
            if any(completion.finish == "abort" for completion in completions):
                raise Unavailable("a completion was aborted")
            return completions

        completions = await self.retry.call("completion", attempt, between=self._restore)
        for completion in completions:
            check_mode(completion.logprob_mode, options.get("temperature", 1.0))
        seed = options.get("seed")
        self._drawn(
            [
                Drawn(seed, at, [*prompt_ids, *own.token_ids], own.logprobs, own.versions)
                for at, own in enumerate(completions)
            ]
        )
        return completions

    async def converse(
        self, play: Callable[[Chat], Coroutine[Any, Any, T]], **options: Any
    ) -> tuple[Sample, T]:
        """Return the sample of one conversation and the result of `play`. Retries start it over.

        Raises what `play` raises, and Conflict for logprobs that a trainer cannot use.
        """

        async def attempt(_: int) -> tuple[Sample, T]:
            chat = self.policy.chat(**options)
            outcome = await play(chat)
            sample = chat.sample()
            if sample.aborts:
                raise Unavailable("a turn of the conversation was aborted")
            return sample, outcome

        sample, outcome = await self.retry.call("rollout", attempt, between=self._restore)
        check_mode(sample.logprob_mode, sample.temperature)
        seed = options.get("seed")
        self._drawn([Drawn(seed, 0, sample.token_ids, sample.logprobs, sample.versions)])
        return sample, outcome

    async def _restore(self, error: LockstepError) -> None:
        """Publish the weights again before a retry, if the fleet has lost them."""
        if isinstance(error, VersionUnavailable) and self._publisher is not None:
            await self._publisher.ensure()

    async def base_scores(self, token_ids: list[int]) -> Scores:
        """Return the served base model's logprob of every token."""
        async with connect(self.url, self.model, api_key=self._connecting["api_key"]) as base:
            return await self.retry.call("score", lambda _: base.score(token_ids))

    async def facts(self) -> Mapping[str, Any]:
        """Return the name and the numerics plan of the served base model."""
        bases = [card for card in await self.policy.models() if card.parent is None]
        named = [card for card in bases if card.id == self.model] or bases
        return {"id": named[0].id, "numerics": named[0].numerics} if named else {}


def check_mode(mode: str, temperature: float) -> None:
    """Raise Conflict for raw logprobs of tokens that were not sampled at temperature 1."""
    if mode == "raw" and temperature != 1.0:
        raise Conflict(
            f"the server reports raw logprobs, but tokens are sampled at temperature {temperature} "
            "and TRL computes logprobs at that temperature: start the engine with "
            "`--logprobs-mode processed`, or train at temperature 1",
            param="temperature",
        )
