"""Blocking version of the client for notebooks; it runs an event loop in its own thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from lockstep.backends.transport import ModelCard
from lockstep.client.chat import Chat
from lockstep.client.policy import Policy, Prompt, connect
from lockstep.client.turn import Scores, Turn
from lockstep.tokens import Sample

T = TypeVar("T")


class LoopThread:
    """An event loop in a thread. Ctrl-C cancels the call in progress."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop, blocking, and return its result or raise its error."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def stop(self) -> None:
        """Stop the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class SyncChat:
    """`Chat` with blocking calls."""

    def __init__(self, loop: LoopThread, chat: Chat) -> None:
        self._loop = loop
        self.chat = chat

    @property
    def messages(self) -> list[Any]:
        return self.chat.messages

    def send(self, message: Any, **options: Any) -> Turn:
        return self._loop.run(self.chat.send(message, **options))

    def send_tool_results(self, results: Any, **options: Any) -> Turn:
        return self._loop.run(self.chat.send_tool_results(results, **options))

    def continue_(self, **options: Any) -> Turn:
        return self._loop.run(self.chat.continue_(**options))

    def sample(self, *, train_aborted: bool = False) -> Sample:
        return self.chat.sample(train_aborted=train_aborted)

    def samples(self, *, train_aborted: bool = False, dedupe: bool = True) -> list[Sample]:
        return self.chat.samples(train_aborted=train_aborted, dedupe=dedupe)


class SyncPolicy:
    """`Policy` with blocking calls. Use it as a context manager, or call `close` at the end."""

    def __init__(self, url: str, model: str | None = None, **options: Any) -> None:
        self._loop = LoopThread()
        self._context: AbstractAsyncContextManager[Policy] = connect(url, model, **options)
        try:
            self.policy = self._loop.run(self._enter())
        except BaseException:
            self._loop.stop()
            raise

    async def _enter(self) -> Policy:
        return await self._context.__aenter__()

    async def _exit(self) -> None:
        await self._context.__aexit__(None, None, None)

    def __enter__(self) -> SyncPolicy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(self, prompt: Prompt, **options: Any) -> Any:
        return self._loop.run(self.policy.generate(prompt, **options))

    def chat(self, **options: Any) -> SyncChat:
        return SyncChat(self._loop, self._loop.run(self._chat(options)))

    async def _chat(self, options: dict[str, Any]) -> Chat:
        return self.policy.chat(**options)

    def score(self, token_ids: Sequence[int], **options: Any) -> Scores:
        return self._loop.run(self.policy.score(token_ids, **options))

    def map(self, prompts: Iterable[Prompt], **options: Any) -> list[Any]:
        return self._loop.run(self.policy.map(prompts, **options))

    def models(self) -> list[ModelCard]:
        return self._loop.run(self.policy.models())

    def close(self) -> None:
        self._loop.run(self._exit())
        self._loop.stop()


def connect_sync(url: str, model: str | None = None, **options: Any) -> SyncPolicy:
    """Connect as `connect` does, without async.

        with lockstep.connect_sync("http://127.0.0.1:8000") as policy:
            (turn,) = policy.generate("Reverse: 40213")

    Every call blocks until it is done.
    """
    return SyncPolicy(url, model, **options)
