"""The HTTP client of admin drivers: bounded calls, repeated only where that is harmless."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar

import msgspec

from lockstep.http.client.client import HttpClient
from lockstep.tokens.errors import (
    Busy,
    Conflict,
    ContractError,
    DeadlineExceeded,
    EngineFailure,
    LockstepError,
    Superseded,
    Unavailable,
    UnknownModel,
    UnsupportedField,
)

T = TypeVar("T")
LOST = (Unavailable, DeadlineExceeded)
"""After these nobody knows whether the worker carried out the command."""
TRANSIENT = (*LOST, Busy)
SUCCESS_STATUSES = ("ok", "success")
STILL_AT_WORK = 1.0
"""Seconds between two looks at a call that was given up here and goes on there."""
SOFT_ERRORS: tuple[tuple[re.Pattern[str], type[LockstepError]], ...] = (
    (re.compile(r"must be paused|already|under way", re.IGNORECASE), Conflict),
    (re.compile(r"not (?:implemented|supported)", re.IGNORECASE), UnsupportedField),
    (re.compile(r"not found|not loaded", re.IGNORECASE), UnknownModel),
)
"""What an error that comes with status 200 means, by its words."""
SHOWN = 200


@dataclass(frozen=True, slots=True)
class CallBudget:
    """Seconds for one attempt and for all together, and how many there may be."""

    attempt: float
    total: float
    tries: int = 4


@dataclass(frozen=True, slots=True)
class CallBudgets:
    """How long each kind of call may take."""

    quick: CallBudget = CallBudget(10.0, 30.0)
    pause: CallBudget = CallBudget(120.0, 300.0)
    load: CallBudget = CallBudget(600.0, 1200.0)
    commit: CallBudget = CallBudget(60.0, 180.0)
    probe: CallBudget = CallBudget(120.0, 300.0)


BUDGETS = CallBudgets()


class AdminClient:
    """Calls one worker. Every error names it.

    An `idempotent` call is repeated when it may have been lost; any other is sent once.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        backoff: float = 0.1,
    ) -> None:
        # The HTTP client itself must not repeat anything: it cannot know what is harmless.
        self.http = HttpClient(url, api_key=token, retries=0, connections=16)
        self._backoff = backoff
        self._closed = False

    @property
    def url(self) -> str:
        return self.http.base_url

    async def get(self, path: str, budget: CallBudget) -> bytearray:
        return await self._call(f"GET {path}", lambda s: self.http.get(path, timeout=s), budget)

    async def post(
        self, path: str, body: object, budget: CallBudget, *, idempotent: bool = False
    ) -> bytearray:
        raw = b"" if body is None else msgspec.json.encode(body)
        return await self._call(
            f"POST {path}",
            lambda seconds: self.http.post(path, raw, timeout=seconds),
            budget,
            idempotent=idempotent,
        )

    async def command(
        self, path: str, body: object, budget: CallBudget, *, idempotent: bool = False
    ) -> dict[str, Any]:
        """POSTs a command; the fields of its response, which must say "ok" or "success"."""
        return self.check_status(await self.post(path, body, budget, idempotent=idempotent), path)

    async def exactly_once(
        self,
        what: str,
        call: Callable[[], Awaitable[T]],
        settled: Callable[[], Awaitable[T | None]],
        budget: CallBudget,
    ) -> T:
        """The result of a call that must not happen twice.

        When the response is lost, `settled` looks at the worker: what it gives is the result; None
        says that the call did not happen, and only then it is made again.
        """
        try:
            async with asyncio.timeout(budget.total):
                for attempt in range(budget.tries):
                    try:
                        return await call()
                    except (*LOST, Conflict) as error:
                        # A conflict of the first attempt is the worker's verdict; later it may be
                        # the echo of an attempt that was thought lost.
                        if self._closed or (isinstance(error, Conflict) and not attempt):
                            raise
                        if (outcome := await settled()) is not None:
                            return outcome
                        if attempt == budget.tries - 1:
                            raise
                    await asyncio.sleep(self._backoff * 2**attempt)
        except TimeoutError:
            pass
        raise DeadlineExceeded(
            f"{self.url} {what}: not settled within {budget.total:g} s; look at the worker before "
            "trying again"
        )

    async def close(self) -> None:
        self._closed = True
        await self.http.close()

    # Responses

    def check_status(self, body: bytes | bytearray, what: str) -> dict[str, Any]:
        """The fields of a response whose `status` is good. Raises what an error in it says."""
        fields = self.decode_object(body, what)
        status = fields.get("status")
        if status in SUCCESS_STATUSES:
            return fields
        message = f"{self.url} {what}: {_message(fields, body)}"
        if status is None and "error" not in fields:
            raise ContractError(f"{message} (expected status {' or '.join(SUCCESS_STATUSES)})")
        raise next((kind for words, kind in SOFT_ERRORS if words.search(message)), EngineFailure)(
            message
        )

    def decode_object(self, body: bytes | bytearray, what: str) -> dict[str, Any]:
        """The JSON object of a response. Raises ContractError for null, text or nothing."""
        try:
            decoded = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            decoded = None
        if not isinstance(decoded, dict):
            raise ContractError(
                f"{self.url} {what}: expected a JSON object that says how it went, "
                f"got {_text(body)}"
            )
        return decoded

    def convert(self, kind: type[T], fields: object, what: str) -> T:
        """The fields as a typed value. Raises ContractError."""
        try:
            return msgspec.convert(fields, kind)
        except msgspec.ValidationError as error:
            raise ContractError(f"{self.url} {what}: {error}") from None

    def expect(self, got: object, wanted: object, what: str) -> None:
        """Raises ContractError unless the worker says of itself what it was told to be."""
        if got != wanted:
            raise ContractError(f"{self.url} {what}: it says {got!r}, expected {wanted!r}")

    async def _call(
        self,
        what: str,
        send: Callable[[float], Awaitable[bytearray]],
        budget: CallBudget,
        *,
        idempotent: bool = True,
    ) -> bytearray:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + budget.total
        attempt = 0
        while True:
            try:
                return await send(max(0.001, min(budget.attempt, deadline - loop.time())))
            except LockstepError as error:
                pause = max(self._backoff * 2**attempt, error.retry_after or 0.0)
                still = isinstance(error, Conflict) and not isinstance(error, Superseded)
                if attempt and still:
                    # An attempt that was thought lost is still at work: waited for, not counted.
                    pause = min(pause, STILL_AT_WORK)
                elif isinstance(error, TRANSIENT):
                    attempt += 1
                else:
                    raise name_worker(error, self.url, what) from None
                spent = attempt >= budget.tries or loop.time() + pause >= deadline
                if spent or not idempotent or self._closed:
                    raise name_worker(error, self.url, what) from None
            await asyncio.sleep(pause)


class AdminOptions(TypedDict, total=False):
    """What may be set on any admin driver."""

    budgets: CallBudgets
    backoff: float


class HttpAdmin:
    """What every admin driver shares: its client, its budgets, and how it is closed."""

    client_class: type[AdminClient] = AdminClient

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        budgets: CallBudgets = BUDGETS,
        backoff: float = 0.1,
    ) -> None:
        self._client = self.client_class(url, token=token, backoff=backoff)
        self._budgets = budgets
        self._generation: Callable[[], int] | None = None

    def fence(self, generation: Callable[[], int]) -> None:
        """Commands carry this number from now on, where the worker knows generations."""
        self._generation = generation

    @property
    def generation(self) -> int | None:
        """The number that commands carry."""
        return None if self._generation is None else self._generation()

    @property
    def url(self) -> str:
        return self._client.url

    async def detect(self) -> None:
        """Find out what the server can do, before its first use. Most drivers know it already."""

    async def close(self) -> None:
        await self._client.close()


def name_worker(error: LockstepError, worker: str, what: str) -> LockstepError:
    """The same error, saying which worker and which call."""
    if worker in error.message:
        return error
    return error.with_message(f"{worker} {what}: {error.message}")


def _message(fields: dict[str, Any], body: bytes | bytearray) -> str:
    for name in ("message", "error", "detail"):
        if isinstance(fields.get(name), str) and fields[name]:
            return str(fields[name])
    return f"its response is {_text(body)}"


def _text(body: bytes | bytearray) -> str:
    return repr(bytes(body[:SHOWN]).decode("utf-8", "replace")) if body else "an empty body"
