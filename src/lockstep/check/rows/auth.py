"""Access to admin routes (--mutate): a token, a POST, and a separate listener."""

from __future__ import annotations

from lockstep.backends.registry import ENGINES
from lockstep.check.outcome import require
from lockstep.check.row import RowGroup
from lockstep.check.target import Target

GROUP = RowGroup("auth", mutates=True)
ROUTES = {name: engine.pause_routes for name, engine in ENGINES.items() if engine.pause_routes}
"""The routes that pause and resume a server, by the name of its admin driver."""


def resume_route(target: Target) -> str:
    """Return an admin route that has no effect on a running server."""
    return ROUTES[target.admin.name][1]


@GROUP.row("token", "admin routes need a token", "L7 F42")
async def token(target: Target) -> str:
    path, evidence = resume_route(target), []
    for what, wrong in (("no token", None), ("a wrong token", "not-the-admin-token")):
        reply = await target.raw.send("POST", target.admin.url + path, {}, token=wrong)
        require(reply.status in (401, 403), f"POST {path} with {what}: {reply.describe()}")
        evidence.append(f"{what}: {reply.status}")
    return f"POST {path}: {', '.join(evidence)}"


@GROUP.row("get", "GET never changes anything", "L7 F42")
async def get(target: Target) -> str:
    path = ROUTES[target.admin.name][0]
    url = target.admin.url + path
    try:
        reply = await target.raw.send("GET", url, token=target.options.token)
        paused = (await target.admin.view()).paused
        require(not paused, f"GET {path}: {reply.describe()}, and the server is paused")
        require(reply.status >= 400, f"GET {path}: {reply.describe()}")
    finally:
        await target.admin.resume()
    return f"GET {path}: {reply.describe()}"


@GROUP.row("listener", "admin routes are not on the data port", "L7")
async def listener(target: Target) -> str:
    path = resume_route(target)
    where = target.transport.base_url
    reply = await target.raw.send("POST", where + path, {}, token=target.options.token)
    require(
        reply.status in (401, 403, 404, 405), f"POST {path} on the data port: {reply.describe()}"
    )
    return f"POST {path} on the data port: {reply.describe()}"
