"""Calls methods of the Lockstep worker extension through vLLM's /collective_rpc."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec

from lockstep.backends.admin import Broadcaster, Source, WeightContents
from lockstep.backends.admin_client import AdminClient, CallBudget, CallBudgets, name_worker
from lockstep.backends.lockstep.admin import join_body, stage_body
from lockstep.protocol.common.decode_error import error_of
from lockstep.protocol.control.read_back import ReadBack, merge_ranks
from lockstep.tokens.errors import (
    Conflict,
    ContractError,
    DeadlineExceeded,
    EngineFailure,
    NotFound,
    Unavailable,
)

VIEW = "lockstep_view"
"""No arguments. Returns {"version": str | null, "staged": str | null, "probes": bool, "digests":
bool, "reads_back": bool, "generation": int, "gateway": str | null}; `probes` says whether the
extension has PROBE, `digests` whether it has DIGEST, `reads_back` whether it has READ_BACK. STAGE,
COMMIT, ROLLBACK and JOIN take keyword arguments `generation` (int) and `gateway` (str): a number
below the highest one obeyed so far, or the same number of another gateway, is rejected as
`superseded`. Every method but READ_BACK returns the same on every rank. A method that failed
returns {"error": {...}} with the fields of protocol.common.error_body."""
STAGE = "lockstep_stage"
"""Keyword arguments: the fields of protocol.control.worker.Stage. Returns {"staged": version} once
they are in memory and {"staged": null} until then, when it is to be called again: a call that
waited would block generation. Does not touch the live weights."""
COMMIT = "lockstep_commit"
"""Keyword argument `version`: swaps in what is staged, packs it, keeps the old weights for one
rollback. Raises unless that version is staged. Returns {"version": version}. The server is paused.
"""
ROLLBACK = "lockstep_rollback"
"""Keyword arguments `version` and `staged`, as the caller read them; raises when they have changed.
Drops what is staged, or else undoes the last commit. Returns {"version": str}."""
PROBE = "lockstep_probe"
"""Keyword arguments `token_ids` (a list of lists) and `adapter` (null). Returns {"logprobs": a list
of lists}, each one shorter than its sequence. Works while paused."""
DIGEST = "lockstep_digest"
"""Keyword arguments `staged` and `tensors` (both bool). Returns {"digest": str | null, "dtype":
str} of what was read when the live or staged weights were loaded, and "tensors" with the digest of
each."""
READ_BACK = "lockstep_read_back"
"""Keyword arguments `adapter` and `path`: null for the weights, or the name of an adapter and its
directory. Returns the fields of protocol.control.read_back.ReadBack, of this rank: the weights that
the engine computes with, compared with the tensors it was given. Call it between two batches."""
JOIN = "lockstep_join_group"
"""Keyword arguments: the fields of protocol.control.worker.JoinGroup; `rank` is that of the
server's first rank, the others follow. Returns {"group_name": str}."""

ROUTE = "/collective_rpc"
POLL_FIRST, POLL_LAST = 0.02, 1.0
"""Seconds between two polls of weights that are being staged."""
NO_METHOD = re.compile(r"has no attribute|not implemented", re.IGNORECASE)


class ExtensionView(msgspec.Struct, frozen=True):
    """The state that the extension reports."""

    version: str | None
    staged: str | None
    probes: bool = False
    digests: bool = False
    reads_back: bool = False
    generation: int = 0
    gateway: str | None = None


class _Contents(msgspec.Struct):
    digest: str | None
    dtype: str | None
    tensors: dict[str, str] = {}


class _RankResults(msgspec.Struct):
    results: list[Any]


async def collective_rpc(
    client: AdminClient,
    method: str,
    kwargs: dict[str, Any],
    budget: CallBudget,
    *,
    idempotent: bool = False,
) -> list[Any]:
    """Return the result of each rank. Raises ContractError when there is none: nothing was done."""
    body = {"method": method, "kwargs": kwargs, "timeout": budget.attempt}
    raw = await client.post(ROUTE, body, budget, idempotent=idempotent)
    results = client.convert(_RankResults, client.decode_object(raw, method), method).results
    if not results:
        raise ContractError(f"{client.url} {method}: no rank responded")
    return results


class ExtensionClient:
    """The worker extension of one server.

    `quiet` keeps it paused for a block of code; `label` sets the version that the server reports
    and drops cached prefixes.
    """

    def __init__(
        self,
        client: AdminClient,
        budgets: CallBudgets,
        quiet: Callable[[], AbstractAsyncContextManager[None]],
        label: Callable[[str], Awaitable[None]],
        fencing: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self._client = client
        self._budgets = budgets
        self._quiet = quiet
        self._label = label
        self._fencing = fencing

    async def view(self) -> ExtensionView:
        response = await self._call(VIEW, {}, self._budgets.quick, idempotent=True)
        return self._client.convert(ExtensionView, response, VIEW)

    async def detect(self) -> ExtensionView | None:
        """Return the view, or None where no extension is loaded."""
        try:
            return await self.view()
        except NotFound:
            return None
        except EngineFailure as error:
            if NO_METHOD.search(error.message):
                return None
            raise

    async def stage(self, source: Source, version: str) -> None:
        kwargs = msgspec.to_builtins(stage_body(source, version, **self._fencing()))
        # A broadcast sends its tensors once; any other source can be read again.
        idempotent = source.group is None
        loop = asyncio.get_running_loop()
        deadline, pause = loop.time() + self._budgets.load.total, POLL_FIRST
        while True:
            responses = await self._each(STAGE, kwargs, self._budgets.load, idempotent=idempotent)
            staged = [response.get("staged") for response in responses]
            if None not in staged:
                self._client.expect(staged, [version] * len(staged), STAGE)
                return
            if loop.time() + pause > deadline:
                raise DeadlineExceeded(
                    f"{self._client.url} {STAGE}: {version!r} was not in memory after "
                    f"{self._budgets.load.total:g} s"
                )
            await asyncio.sleep(pause)
            pause = min(pause * 2, POLL_LAST)

    async def commit(self, version: str) -> None:
        async def commit() -> bool:
            kwargs = {"version": version, **self._fencing()}
            response = await self._call(COMMIT, kwargs, self._budgets.commit)
            self._client.expect(response.get("version"), version, COMMIT)
            return True

        async def look_up() -> bool | None:
            view = await self.view()
            if view.staged == version:
                return None
            if view.version == version:
                return True
            raise Conflict(
                f"{self._client.url} {COMMIT}: the response was lost, and {version!r} is neither "
                "staged nor served now: stage it again"
            )

        # The swap and the server's label are two calls. Paused in between, so that no token is
        # sampled from the new weights under the old label.
        async with self._quiet():
            await self._client.exactly_once(COMMIT, commit, look_up, self._budgets.commit)
            await self._label(version)

    async def rollback(self) -> str | None:
        before = await self.view()
        expected = {"version": before.version, "staged": before.staged, **self._fencing()}

        async def rollback() -> str:
            response = await self._call(ROLLBACK, expected, self._budgets.commit)
            return str(response.get("version"))

        async def look_up() -> str | None:
            now = await self.view()
            if now == before:
                return None
            if now.version is None:
                raise Unavailable(f"{self._client.url} {ROLLBACK}: it restarted meanwhile")
            return now.version

        if before.staged is not None:
            return await self._client.exactly_once(
                ROLLBACK, rollback, look_up, self._budgets.commit
            )
        async with self._quiet():
            version = await self._client.exactly_once(
                ROLLBACK, rollback, look_up, self._budgets.commit
            )
            await self._label(version)
        return version

    async def probe(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        kwargs = {"token_ids": [list(ids) for ids in token_ids], "adapter": None}
        response = await self._call(PROBE, kwargs, self._budgets.probe, idempotent=True)
        return self._client.convert(list[list[float]], response.get("logprobs"), PROBE)

    async def contents(self, *, staged: bool, tensors: bool) -> WeightContents:
        """Return what every rank read. Raises ContractError when ranks did not read the same."""
        kwargs = {"staged": staged, "tensors": tensors}
        response = await self._call(DIGEST, kwargs, self._budgets.quick, idempotent=True)
        contents = self._client.convert(_Contents, response, DIGEST)
        return WeightContents(contents.digest, contents.dtype, None, contents.tensors)

    async def read_back(self, adapter: str | None, path: Path | None) -> ReadBack:
        """Return the comparison of held weights of all ranks, for the weights or an adapter."""
        kwargs = {"adapter": adapter, "path": str(path or "")}
        results = await self._each(READ_BACK, kwargs, self._budgets.load, idempotent=True)
        return merge_ranks(
            [self._client.convert(ReadBack, result, READ_BACK) for result in results]
        )

    async def join_group(self, broadcaster: Broadcaster) -> None:
        kwargs = msgspec.to_builtins(join_body(broadcaster, **self._fencing()))
        budget = CallBudget(broadcaster.seconds + 10.0, broadcaster.seconds + 10.0)
        response = await self._call(JOIN, kwargs, budget)
        self._client.expect(response.get("group_name"), broadcaster.group, JOIN)

    async def _call(
        self, method: str, kwargs: dict[str, Any], budget: CallBudget, *, idempotent: bool = False
    ) -> dict[str, Any]:
        """Return the common response of all ranks. Raises ContractError when they differ."""
        first, *others = await self._each(method, kwargs, budget, idempotent=idempotent)
        if any(other != first for other in others):
            raise ContractError(
                f"{self._client.url} {method}: expected the same of all ranks, "
                f"got {[first, *others]!r:.200}"
            )
        return first

    async def _each(
        self, method: str, kwargs: dict[str, Any], budget: CallBudget, *, idempotent: bool = False
    ) -> list[dict[str, Any]]:
        """Return the response of each rank. Raises the first error that a rank reports."""
        results = await collective_rpc(self._client, method, kwargs, budget, idempotent=idempotent)
        for result in results:
            if not isinstance(result, dict):
                raise ContractError(
                    f"{self._client.url} {method}: expected one object, the same of all ranks, "
                    f"got {results!r:.200}"
                )
            if error := result.get("error"):
                body = msgspec.json.encode(error)
                raise name_worker(error_of(500, body), self._client.url, method)
        return results
