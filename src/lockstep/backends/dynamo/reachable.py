"""Check that etcd and NATS are reachable, before Dynamo waits for them in silence."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import urlsplit

from lockstep.http.client.client import HttpClient
from lockstep.protocol.dynamo import environment as dynamo_env
from lockstep.tokens.errors import LockstepError, Unavailable

log = logging.getLogger(__name__)
SECONDS = 3.0
WAIT_SECONDS = 1.0
"""Time between two checks of an unreachable server."""


async def check_reachable(environ: Mapping[str, str], seconds: float = SECONDS) -> None:
    """Raise Unavailable, naming the server, when one does not respond within `seconds`.

    Checks the servers that `environ` configures for Dynamo: one etcd of those listed, and NATS
    where it carries requests or events. Credentials are not tried.
    """
    if environ.get(dynamo_env.DISCOVERY) == "etcd":
        await _check_any("etcd", dynamo_env.endpoints(environ), _etcd, seconds)
    if "nats" in (environ.get(dynamo_env.REQUEST_PLANE), environ.get(dynamo_env.EVENT_PLANE)):
        await _check_any("NATS", environ.get(dynamo_env.NATS, "").split(","), _nats, seconds)


async def wait_until_reachable(environ: Mapping[str, str]) -> None:
    """Wait until `check_reachable` passes; log once which server is missing."""
    logged = False
    while True:
        try:
            await check_reachable(environ)
            return
        except Unavailable as error:
            if not logged:
                log.warning("waiting: %s", error.message)
            logged = True
        await asyncio.sleep(WAIT_SECONDS)


async def _check_any(
    name: str, urls: list[str], check: Callable[[str], Awaitable[None]], seconds: float
) -> None:
    problems = []
    for url in urls:
        parts = urlsplit(url if "://" in url else f"//{url}")
        try:
            async with asyncio.timeout(seconds):
                await check(url)
            return
        except TimeoutError:
            problem = f"no response within {seconds:g} s"
        except LockstepError as error:
            problem = error.message
        except OSError as error:
            number = error.errno or 0
            problem = os.strerror(number) if number > 0 else str(error)
        problems.append(f"{parts.hostname}:{parts.port}: {problem}")
    raise Unavailable(
        f"{name} cannot be reached from this host ({'; '.join(problems)}): start it, or correct "
        "its address"
    )


async def _etcd(url: str) -> None:
    await _connect(url)
    if url.startswith("https://"):  # only Dynamo has its certificates
        return
    client = HttpClient(url, retries=0)
    try:
        status, body = await client.exchange("GET", "/health")
    finally:
        await client.close()
    if b'"health"' not in body:
        raise Unavailable(f"the server there is not etcd (GET /health: {status})")
    if b'"true"' not in body:
        raise Unavailable("it reports that it is not healthy: has it lost its quorum?")


async def _nats(url: str) -> None:
    greeting = await _connect(url, greets=not url.startswith("tls://"))
    if not url.startswith("tls://") and not greeting.startswith(b"INFO "):
        raise Unavailable("the server there is not NATS")


async def _connect(url: str, *, greets: bool = False) -> bytes:
    parts = urlsplit(url if "://" in url else f"//{url}")
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        return await reader.read(64) if greets else b""
    finally:
        writer.close()
