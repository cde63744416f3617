"""Control of Dynamo workers without a probe route: their probes go through the frontend."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from lockstep.backends.admin_client import BUDGETS, CallBudgets
from lockstep.backends.dynamo.admin import DynamoAdmin
from lockstep.backends.dynamo.discovery import DiscoveredWorker
from lockstep.backends.dynamo.transport import DynamoTransport, pinned_url
from lockstep.backends.lockstep.admin import check_scores
from lockstep.http.client.client import HttpClient
from lockstep.protocol.common.request import GenerateRequest
from lockstep.tokens import Sampling
from lockstep.tokens.errors import BadRequest, UnknownModel

LISTED_SECONDS = 15.0
"""How long a frontend may take to list an adapter that a worker has loaded."""
LOOK_SECONDS = 0.1


class FrontendProbeAdmin(DynamoAdmin):
    """One worker that discovery listed, of a kind that has a probe route or not.

    Lockstep's workers score by themselves, also while paused. For Dynamo's own, the logprobs of a
    prompt are requested, pinned to this worker, at temperature 1: there all modes agree.
    """

    def __init__(
        self, worker: DiscoveredWorker, *, token: str | None = None, budgets: CallBudgets = BUDGETS
    ) -> None:
        if worker.admin_url is None or worker.data_url is None:
            raise BadRequest(
                f"worker {worker.id} cannot be controlled: {worker.error}", param="url"
            )
        super().__init__(worker.admin_url, worker.routes, token, budgets=budgets)
        self._model = worker.model
        self._transport = DynamoTransport(
            HttpClient(pinned_url(worker.data_url, worker.id), retries=0)
        )

    async def probe(
        self, token_ids: Sequence[Sequence[int]], *, adapter: str | None = None
    ) -> list[list[float]]:
        if "probe" in self.routes:
            return await super().probe(token_ids, adapter=adapter)
        model = adapter or self._model
        rows = [await self._score(list(ids), model) for ids in token_ids]
        check_scores(rows, token_ids, f"{self.url} probe")
        return rows

    async def load_adapter(self, name: str, path: Path, label: str | None = None) -> str:
        """Load an adapter; return once the frontend lists it, as earlier requests would get 404."""
        loaded = await super().load_adapter(name, path, label)
        await self._wait_until_listed(name)
        return loaded

    async def close(self) -> None:
        await self._transport.close()
        await super().close()

    async def _score(self, ids: list[int], model: str | None) -> list[float]:
        sampling = Sampling(temperature=1.0, max_tokens=1, prompt_logprobs=0)
        [completion] = await self._transport.generate(
            GenerateRequest(prompt_ids=ids, model=model, sampling=sampling)
        )
        return [
            entry.logprob for entry in (completion.prompt_logprobs or [])[1:] if entry is not None
        ]

    async def _wait_until_listed(self, name: str) -> None:
        try:
            async with asyncio.timeout(LISTED_SECONDS):
                while name not in {card.id for card in await self._transport.models()}:
                    await asyncio.sleep(LOOK_SECONDS)
        except TimeoutError:
            raise UnknownModel(
                f"{self.url} has loaded the adapter {name!r}, but {self._transport.base_url} does "
                f"not list it after {LISTED_SECONDS:g} s"
            ) from None
