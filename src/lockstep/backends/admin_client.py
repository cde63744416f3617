"""The HTTP client of admin drivers: calls with budgets, retried only where that is harmless."""

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
"""After these errors it is unknown whether the worker carried out the command."""
TRANSIENT = (*LOST, Busy)
SUCCESS_STATUSES = ("ok", "success")
STILL_AT_WORK = 1.0
"""Seconds between two checks of a call that timed out here and still runs on the worker."""
SOFT_ERRORS: tuple[tuple[re.Pattern[str], type[LockstepError]], ...] = (
    (re.compile(r"must be paused|already|under way", re.IGNORECASE), Conflict),
    (re.compile(r"not (?:implemented|supported)", re.IGNORECASE), UnsupportedField),
    (re.compile(r"not found|not loaded", re.IGNORECASE), UnknownModel),
)
"""The error that a failure with status 200 means, by its words."""
EXCERPT_BYTES = 200


@dataclass(frozen=True, slots=True)
class CallBudget:
    """Seconds for one attempt and for all attempts together, and the number of attempts."""

    attempt: float
    total: float
    tries: int = 4


@dataclass(frozen=True, slots=True)
class CallBudgets:
    """The budget of each kind of call."""

    quick: CallBudget = CallBudget(10.0, 30.0)
    pause: CallBudget = CallBudget(120.0, 300.0)
    load: CallBudget = CallBudget(600.0, 1200.0)
    commit: CallBudget = CallBudget(60.0, 180.0)
    probe: CallBudget = CallBudget(120.0, 300.0)


BUDGETS = CallBudgets()


class AdminClient:
    """Calls to one worker. Every error names it.

    An `idempotent` call is retried when its response was lost; any other call is sent once.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        backoff: float = 0.1,
    ) -> None:
        # The HTTP client itself must not retry: it does not know which calls are idempotent.
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
        """POST a command; return the fields of its response, which must say "ok" or "success"."""
        return self.check_status(await self.post(path, body, budget, idempotent=idempotent), path)

    async def exactly_once(
        self,
        what: str,
        call: Callable[[], Awaitable[T]],
        look_up: Callable[[], Awaitable[T | None]],
        budget: CallBudget,
    ) -> T:
        """Return the result of a call that must not happen twice.

        When the response is lost, `look_up` reads the worker's state and returns the result of the
        call, or None if the call did not happen. Only then it is sent again.
        """
        try:
            async with asyncio.timeout(budget.total):
                for attempt in range(budget.tries):
                    try:
                        return await call()
                    except (*LOST, Conflict) as error:
                        # A conflict of the first attempt is the worker's answer. A later one may
                        # come from an attempt whose response was lost but which succeeded.
                        if self._closed or (isinstance(error, Conflict) and not attempt):
                            raise
                        if (outcome := await look_up()) is not None:
                            return outcome
                        if attempt == budget.tries - 1:
                            raise
                    await asyncio.sleep(self._backoff * 2**attempt)
        except TimeoutError:
            pass
        raise DeadlineExceeded(
            f"{self.url} {what}: outcome unknown after {budget.total:g} s; check the worker before "
            "trying again"
        )

    async def close(self) -> None:
        self._closed = True
        await self.http.close()

    # Responses

    def check_status(self, body: bytes | bytearray, what: str) -> dict[str, Any]:
        """Return the fields of a successful response. Raises the error that it reports
        otherwise."""
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
        """Return the JSON object of a response. Raises ContractError for null, text or an empty
        body."""
        try:
            decoded = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            decoded = None
        if not isinstance(decoded, dict):
            raise ContractError(
                f"{self.url} {what}: expected a JSON object with the outcome, got {_text(body)}"
            )
        return decoded

    def convert(self, kind: type[T], fields: object, what: str) -> T:
        """Return the fields as a typed value. Raises ContractError."""
        try:
            return msgspec.convert(fields, kind)
        except msgspec.ValidationError as error:
            raise ContractError(f"{self.url} {what}: {error}") from None

    def expect(self, got: object, wanted: object, what: str) -> None:
        """Raise ContractError unless the worker reports the value it was set to."""
        if got != wanted:
            raise ContractError(f"{self.url} {what}: it reports {got!r}, expected {wanted!r}")

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
                    # An earlier attempt timed out here and still runs there. Wait for it; this
                    # does not count as an attempt.
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
    """Options of every admin driver."""

    budgets: CallBudgets
    backoff: float


class HttpAdmin:
    """Base of all admin drivers: the client, the budgets, and how to close them."""

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
        self._gateway = ""

    def fence(self, generation: Callable[[], int], gateway: str) -> None:
        """Send both with every command from now on, where the worker has generations."""
        self._generation, self._gateway = generation, gateway

    @property
    def fencing(self) -> dict[str, Any]:
        """Fields that commands carry: the generation and its gateway; empty before `fence`."""
        if self._generation is None:
            return {}
        return {"generation": self._generation(), "gateway": self._gateway}

    @property
    def url(self) -> str:
        return self._client.url

    async def detect(self) -> None:
        """Find out what the server can do, before its first use. Most drivers know it already."""

    async def close(self) -> None:
        await self._client.close()


def name_worker(error: LockstepError, worker: str, what: str) -> LockstepError:
    """Return the same error, naming the worker and the call."""
    if worker in error.message:
        return error
    return error.with_message(f"{worker} {what}: {error.message}")


def _message(fields: dict[str, Any], body: bytes | bytearray) -> str:
    for name in ("message", "error", "detail"):
        if isinstance(fields.get(name), str) and fields[name]:
            return str(fields[name])
    return f"its response is {_text(body)}"


def _text(body: bytes | bytearray) -> str:
    if not body:
        return "an empty body"
    return repr(bytes(body[:EXCERPT_BYTES]).decode("utf-8", "replace"))
