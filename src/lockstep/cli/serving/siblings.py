"""Further gateway processes on this machine, which listen on the same port as the first."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lockstep.cli.derived_flags import command_line
from lockstep.cli.serving.arguments import GatewayArguments
from lockstep.settings import ADMIN_TOKEN, ADMIN_TOKEN_FILE, STORE, Settings
from lockstep.tokens.errors import BadRequest

if TYPE_CHECKING:
    from lockstep.launch.supervisor import Child, Command

log = logging.getLogger(__name__)
OF_THE_FIRST = frozenset(
    ("port", "admin_port", "advertise", "state_dir", "sessions", "store", "fresh", "run_dir",
     "prime_rl", "json", "gateways", "share_port")
)  # fmt: skip
"""Options that are not passed on to the other gateways, or with another value."""


class SiblingGateways:
    """The other gateway processes of `--gateways N`; one that ends is restarted.

    Raises BadRequest for several gateways without a store that they can share.
    """

    def __init__(self, arguments: GatewayArguments, settings: Settings) -> None:
        self._arguments, self._count = arguments, arguments.gateways - 1
        self._store = arguments.store or settings.store
        self._task: asyncio.Task[None] | None = None
        if arguments.gateways < 1:
            raise BadRequest(
                f"--gateways is {arguments.gateways}: expected at least 1", param="gateways"
            )
        if self._count and self._store is None:
            raise BadRequest(
                f"--gateways {arguments.gateways} needs a store that gateways can share: give "
                f"--store postgresql://..., because a session file belongs to one gateway",
                param="gateways",
            )

    def start(self, url: str, token: str, stop: asyncio.Event) -> None:
        """Start the processes on the port of `url`, once the first gateway serves there. When
        `stop` is set they drain, as the first one does.
        """
        if self._count:
            self._task = asyncio.create_task(self._run(url, token, stop))

    async def ended(self, stop: asyncio.Event) -> None:
        """Wait until none of the processes runs; stop them now unless they are draining."""
        if self._task is not None:
            if not stop.is_set():
                self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self, url: str, token: str, stop: asyncio.Event) -> None:
        from lockstep.launch.supervisor import Command, Supervisor

        names = [f"gateway {number + 2}" for number in range(self._count)]
        port = urlsplit(url).port

        def command(child: Child) -> Command:
            return Command(self.command_line(port or 0, child.system_url), self.environ(token))

        drain = self._arguments.gateway.drain_seconds
        async with Supervisor(names, command, drain_seconds=drain) as children:
            for child in children.children:
                child.ready.add_done_callback(_say)
            await stop.wait()

    def command_line(self, port: int, admin_url: str, *, first: bool = False) -> tuple[str, ...]:
        """Return the command of a gateway on the shared port. With `first`, it is the gateway at
        the address of --advertise; the others have it with their own port."""
        admin_port = admin_url.rpartition(":")[2]
        advertise: tuple[str, ...] = ()
        address = self._arguments.advertise
        if address is not None and first:
            advertise = ("--advertise", address)
        elif address is not None:
            parts = urlsplit(address)
            host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
            advertise = ("--advertise", f"{parts.scheme}://{host}:{admin_port}")
        # -P: Python must not import files in the gateway's working directory as modules.
        return (
            sys.executable, "-P", "-m", "lockstep.cli.parent_death", str(os.getpid()), "gateway",
            "--json", "--share-port", "--port", str(port), "--admin-port", admin_port,
            *advertise, *self._passed_on(),
        )  # fmt: skip

    def _passed_on(self) -> Iterator[str]:
        """Yield the options that are not at their default, as command-line arguments."""
        for option, value in command_line(self._arguments, skip=OF_THE_FIRST):
            if value is True:
                yield option
                continue
            for item in value if isinstance(value, list) else [value]:
                yield from (option, str(item.absolute()) if isinstance(item, Path) else str(item))

    def environ(self, token: str) -> dict[str, str]:
        """Return the environment of a process. It holds the store's URL, because other users can
        read a command line.
        """
        environ = {**os.environ, ADMIN_TOKEN: token, STORE: self._store or ""}
        environ.pop(ADMIN_TOKEN_FILE, None)
        return environ


def _say(ready: asyncio.Future[dict[str, Any]]) -> None:
    """Log that a gateway serves, or why it does not."""
    if ready.cancelled():
        return
    if (error := ready.exception()) is not None:
        log.error("a gateway stopped serving: %s", error)
    else:
        log.info("another gateway is serving, admin port at %s", ready.result().get("admin_url"))
