"""Several gateway processes on one port, under a parent process that serves nothing itself.

The parent starts the gateways and the workers and restarts each that ends. No request passes
through it, so whichever gateway is killed, the others and the workers stay.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from lockstep.cli.serving.siblings import SiblingGateways
from lockstep.tokens.errors import Unavailable

if TYPE_CHECKING:
    from lockstep.cli.serving.arguments import GatewayArguments
    from lockstep.cli.serving.sources import StartedWorker
    from lockstep.http.client.client import HttpClient
    from lockstep.launch.supervisor import Child, Command
    from lockstep.settings import Settings

REGISTER_SECONDS = 60.0
"""How long the workers may take to be added to the fleet, and to prove its version."""
LOOK_SECONDS = 0.1


class GatewayGroup:
    """The gateways of `--gateways N`, alive while the block of `running` runs.

    `flags` are the options by which the first gateway finds its workers. The others read them from
    the store. `model_dir` holds the weights that the workers start with, where that is known.
    """

    def __init__(
        self,
        arguments: GatewayArguments,
        settings: Settings,
        token: str,
        flags: tuple[str, ...],
        model_dir: Path | None,
    ) -> None:
        self._arguments, self._token, self._flags = arguments, token, flags
        self._siblings = SiblingGateways(arguments, settings)
        self._model = () if model_dir is None else ("--model-dir", str(model_dir.absolute()))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[dict[str, Any]]:
        """Run the gateways while the block runs; return the ready line of the first. At the end all
        of them drain at once. Raises EngineFailure when one cannot start."""
        from lockstep.http.server.server import listen
        from lockstep.launch.supervisor import Command, Supervisor

        gateway = self._arguments.gateway
        environ = self._siblings.environ(self._token)
        async with AsyncExitStack() as stack:
            # Bound and never listened on: the port stays reserved while gateways are restarted.
            sock = stack.enter_context(listen(gateway.host, gateway.port, share=True))
            port = int(sock.getsockname()[1])

            def first_command(child: Child) -> Command:
                return Command(self._first_line(port, child), environ)

            def command(child: Child) -> Command:
                line = self._siblings.command_line(port, child.system_url)
                return Command((*line, *self._model), environ)

            drain = gateway.drain_seconds
            first = Supervisor(
                ["gateway 1"], first_command, ports=(0, gateway.admin_port), drain_seconds=drain
            )
            names = [f"gateway {number + 2}" for number in range(self._arguments.gateways - 1)]
            others = Supervisor(names, command, drain_seconds=drain)
            await stack.enter_async_context(first)
            # The others join the fleet of the first. With --fresh it must be alone on the store.
            await first.ready()
            await stack.enter_async_context(others)
            try:
                yield dict(first.children[0].ready.result())
            finally:
                await asyncio.gather(first.stop(), others.stop())

    def _first_line(self, port: int, child: Child) -> tuple[str, ...]:
        arguments = self._arguments
        more = [*self._flags, *self._model]
        if arguments.run_dir is not None:
            more += ["--run-dir", str(arguments.run_dir.absolute())]
        # Only once: a restarted gateway must not drop what the fleet has done since.
        if arguments.fresh and not child.restarts:
            more.append("--fresh")
        return (*self._siblings.command_line(port, child.system_url, first=True), *more)


async def register_workers(admin_url: str, token: str, workers: list[StartedWorker]) -> None:
    """Add workers to the fleet of a gateway and wait until all of them serve.

    Raises Unavailable with the reasons when they do not, and the error of a rejected worker.
    """
    from lockstep.http.client.client import HttpClient

    client = HttpClient(admin_url, api_key=token, retries=0, timeout=REGISTER_SECONDS)
    reasons = ["none was added"]
    try:
        async with asyncio.timeout(REGISTER_SECONDS):
            for worker in workers:
                body = msgspec.json.encode(worker.body(token))
                while not await _add(client, body, reasons):
                    await asyncio.sleep(LOOK_SECONDS)
            while reasons:
                rows = msgspec.json.decode(await client.get("/v1/rl/state"))["workers"]
                states = {row["id"]: row for row in rows}
                late = [worker.id for worker in workers if not _serves(states.get(worker.id))]
                reasons = [f"{name}: {states.get(name, {}).get('reason')}" for name in late]
                await asyncio.sleep(LOOK_SECONDS)
    except TimeoutError:
        raise Unavailable(
            f"not all of {len(workers)} workers serve after {REGISTER_SECONDS:g} s: "
            f"{'; '.join(reasons)}"
        ) from None
    finally:
        await client.close()


async def _add(client: HttpClient, body: bytes, reasons: list[str]) -> bool:
    """Return whether the worker was added. A gateway that was killed before is counted as alive for
    5 s, in which no gateway may lead and take workers."""
    try:
        await client.post("/v1/rl/workers", body)
    except Unavailable as error:
        reasons[:] = [error.message]
        return False
    return True


def _serves(row: dict[str, Any] | None) -> bool:
    return row is not None and row["state"] == "serving"
