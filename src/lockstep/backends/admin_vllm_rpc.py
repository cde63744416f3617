"""vLLM's /collective_rpc, and the Lockstep worker extension that answers behind it."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from lockstep.backends.admin import Broadcaster, Source
from lockstep.backends.admin_http import Budget, Budgets, Caller
from lockstep.backends.admin_lockstep import join_body, stage_body
from lockstep.tokens.errors import Conflict, ContractError, EngineFailure, NotFound, Unavailable

VIEW = "lockstep_view"
"""No arguments. Gives {"version": str | null, "staged": str | null, "probes": bool}; `probes` says
whether the extension has PROBE. Every method gives the same on every rank."""
STAGE = "lockstep_stage"
"""Keyword arguments: the fields of wire.control.Stage. Gives {"staged": version}. Leaves the live
weights alone, and may be repeated."""
COMMIT = "lockstep_commit"
"""Keyword argument `version`: swaps in what is staged, packs it, keeps the old for one rollback.
Raises unless that version is staged. Gives {"version": version}. The server is paused."""
ROLLBACK = "lockstep_rollback"
"""Keyword arguments `version` and `staged`, as the caller saw them; raises when they are no longer
so. Drops what is staged, or else undoes the last commit. Gives {"version": str}."""
PROBE = "lockstep_probe"
"""Keyword arguments `token_ids` (a list of lists) and `adapter` (str | null). Gives {"logprobs": a
list of lists}, each one shorter than its sequence. Works while paused."""
JOIN = "lockstep_join_group"
"""Keyword arguments: the fields of wire.control.JoinGroup; `rank` is that of the server's first
rank, the others follow. Gives {"group_name": str}."""

ROUTE = "/collective_rpc"
NO_METHOD = re.compile(r"has no attribute|not implemented", re.IGNORECASE)


class Seen(msgspec.Struct, frozen=True):
    """What the extension says of itself."""

    version: str | None
    staged: str | None
    probes: bool = False


class _Answer(msgspec.Struct):
    results: list[Any]


async def collective_rpc(
    caller: Caller, method: str, kwargs: dict[str, Any], budget: Budget, *, again: bool = False
) -> list[Any]:
    """What each rank gave. Raises ContractError when there is none: then nobody did it."""
    body = {"method": method, "kwargs": kwargs, "timeout": budget.attempt}
    raw = await caller.post(ROUTE, body, budget, again=again)
    results = caller.read(_Answer, caller.fields(raw, method), method).results
    if not results:
        raise ContractError(f"{caller.url} {method}: no rank answered")
    return results


class Extension:
    """The worker extension of one server. `ready` raises unless its weights may be swapped now,
    `label` tells the server the version it serves and drops cached prefixes."""

    def __init__(
        self,
        caller: Caller,
        budgets: Budgets,
        ready: Callable[[], Awaitable[None]],
        label: Callable[[str], Awaitable[None]],
    ) -> None:
        self._caller = caller
        self._budgets = budgets
        self._ready = ready
        self._label = label

    async def view(self) -> Seen:
        answer = await self._call(VIEW, {}, self._budgets.quick, again=True)
        return self._caller.read(Seen, answer, VIEW)

    async def find(self) -> Seen | None:
        """The view, or None where no extension is loaded."""
        try:
            return await self.view()
        except NotFound:
            return None
        except EngineFailure as error:
            if NO_METHOD.search(error.message):
                return None
            raise

    async def stage(self, source: Source, version: str) -> None:
        kwargs = msgspec.to_builtins(stage_body(source, version))
        # Tensors of a broadcast come once; anything else can be read again.
        again = source.group is None
        answer = await self._call(STAGE, kwargs, self._budgets.load, again=again)
        self._caller.expect(answer.get("staged"), version, STAGE)

    async def commit(self, version: str) -> None:
        await self._ready()

        async def commit() -> bool:
            answer = await self._call(COMMIT, {"version": version}, self._budgets.commit)
            self._caller.expect(answer.get("version"), version, COMMIT)
            return True

        async def settled() -> bool | None:
            seen = await self.view()
            if seen.staged == version:
                return None
            if seen.version == version:
                return True
            raise Conflict(
                f"{self._caller.url} {COMMIT}: the answer was lost, and {version!r} is neither "
                "staged nor served now: stage it again"
            )

        await self._caller.once(COMMIT, commit, settled, self._budgets.commit)
        await self._label(version)

    async def rollback(self) -> str | None:
        before = await self.view()
        if before.staged is None:
            await self._ready()
        expected = {"version": before.version, "staged": before.staged}

        async def rollback() -> str:
            answer = await self._call(ROLLBACK, expected, self._budgets.commit)
            return str(answer.get("version"))

        async def settled() -> str | None:
            now = await self.view()
            if now == before:
                return None
            if now.version is None:
                raise Unavailable(f"{self._caller.url} {ROLLBACK}: it was started anew meanwhile")
            return now.version

        version = await self._caller.once(ROLLBACK, rollback, settled, self._budgets.commit)
        if before.staged is None:
            await self._label(version)
        return version

    async def probe(
        self, token_ids: Sequence[Sequence[int]], adapter: str | None
    ) -> list[list[float]]:
        kwargs = {"token_ids": [list(ids) for ids in token_ids], "adapter": adapter}
        answer = await self._call(PROBE, kwargs, self._budgets.probe, again=True)
        return self._caller.read(list[list[float]], answer.get("logprobs"), PROBE)

    async def join_group(self, how: Broadcaster) -> None:
        kwargs = msgspec.to_builtins(join_body(how))
        budget = Budget(how.seconds + 10.0, how.seconds + 10.0)
        answer = await self._call(JOIN, kwargs, budget)
        self._caller.expect(answer.get("group_name"), how.group, JOIN)

    async def _call(
        self, method: str, kwargs: dict[str, Any], budget: Budget, *, again: bool = False
    ) -> dict[str, Any]:
        """The one answer of all ranks. Raises ContractError when they do not agree."""
        results = await collective_rpc(self._caller, method, kwargs, budget, again=again)
        first = results[0]
        if not isinstance(first, dict) or any(other != first for other in results):
            raise ContractError(
                f"{self._caller.url} {method}: expected one object, the same of all ranks, "
                f"got {results!r:.200}"
            )
        return first
