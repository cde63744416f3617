"""Opens the admin driver for a worker, by name or by asking the worker what it is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from lockstep.backends.admin import Admin, AdminName
from lockstep.backends.admin_client import BUDGETS, AdminClient, CallBudget, CallBudgets
from lockstep.backends.dynamo.admin import DynamoAdmin
from lockstep.backends.lockstep.admin import LockstepAdmin
from lockstep.backends.model_limits import read_models
from lockstep.backends.prime_rl.admin import PrimeAdmin
from lockstep.backends.vllm.admin import VllmAdmin
from lockstep.tokens.errors import (
    BadRequest,
    EngineFailure,
    Forbidden,
    LockstepError,
    NotFound,
    Unauthorized,
    Unavailable,
    UnsupportedField,
)

BackendName = Literal["auto", AdminName]
NAMES: tuple[AdminName, ...] = get_args(AdminName)
LIVENESS = "/engine/liveness_probe"


async def open_admin(
    url: str,
    token: str | None = None,
    backend: BackendName = "auto",
    *,
    routes: Iterable[str] | None = None,
    budgets: CallBudgets = BUDGETS,
    backoff: float = 0.1,
) -> Admin:
    """The driver named, or the one for what the worker at `url` turns out to be.

    `routes` are those a Dynamo worker advertises, as discovery finds them. Raises BadRequest for an
    unknown name, Unauthorized for a wrong token, UnsupportedField for a worker whose control
    routes are switched off, and Unavailable when it cannot be reached or recognised.
    """
    if backend != "auto" and backend not in NAMES:
        raise BadRequest(
            f"backend is {backend!r}, expected auto or one of {', '.join(NAMES)}", param="backend"
        )
    if backend == "auto":
        caller = AdminClient(url, token=token, backoff=backoff)
        try:
            name = await detect(caller, budgets.quick)
        finally:
            await caller.close()
    else:
        name = backend
    if name == "lockstep":
        return LockstepAdmin(url, token, budgets=budgets, backoff=backoff)
    if name == "prime-rl":
        return PrimeAdmin(url, token, budgets=budgets, backoff=backoff)
    if name == "dynamo":
        if routes is None:
            raise BadRequest(
                f"{url} is a Dynamo worker, and which routes it has is told by discovery only: "
                "give routes, as GET /v1/rl/workers lists them",
                param="routes",
            )
        return DynamoAdmin(url, routes, token, budgets=budgets, backoff=backoff)
    admin = VllmAdmin(url, token, budgets=budgets, backoff=backoff)
    try:
        await admin.meet()
    except BaseException:
        await admin.close()
        raise
    return admin


async def detect(caller: AdminClient, budget: CallBudget) -> AdminName:
    """What kind of worker answers there. Asks nothing that changes it."""
    tried: list[str] = []
    try:
        fields = caller.fields(await caller.post(LIVENESS, {}, budget, again=True), LIVENESS)
        return "lockstep" if "weights_id" in fields else "dynamo"
    except (Unauthorized, Forbidden, Unavailable):
        raise
    except LockstepError as error:
        if "Route /engine/" in error.message:
            return "dynamo"
        tried.append(error.message)
    owner = await _owner(caller, budget, tried)
    if owner == "lockstep":
        raise UnsupportedField(
            f"{caller.url} is the data port of a Lockstep worker: give its system_url",
            param="url",
        )
    # prime-rl's server is vLLM, and may have vLLM's own control routes beside its own.
    if await _has(caller, "/liveness", budget, tried):
        return "prime-rl"
    if await _has(caller, "/is_paused", budget, tried):
        return "vllm"
    if owner == "vllm":
        raise UnsupportedField(
            f"{caller.url} is a vLLM server without control routes: start it with "
            "VLLM_SERVER_DEV_MODE=1, on a port that only the fleet can reach",
            param="url",
        )
    raise Unavailable(
        f"cannot tell what {caller.url} is, name it with backend=... ({', '.join(NAMES)}); "
        f"{'; '.join(tried)}"
    )


async def _owner(caller: AdminClient, budget: CallBudget, tried: list[str]) -> str | None:
    try:
        cards = read_models(await caller.get("/v1/models", budget))
    except LockstepError as error:
        tried.append(error.message)
        return None
    return next((card.owned_by for card in cards if card.owned_by), None)


async def _has(caller: AdminClient, path: str, budget: CallBudget, tried: list[str]) -> bool:
    try:
        caller.fields(await caller.get(path, budget), path)
    except (NotFound, EngineFailure, BadRequest) as error:
        tried.append(error.message)
        return False
    except Unavailable:
        return True  # a route that says the engine behind it does not answer is there
    return True
