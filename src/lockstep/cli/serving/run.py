"""Runs a gateway process: opens its state, adds the workers, serves, and drains at the end."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.status import Status

from lockstep.cli.serving.arguments import GatewayArguments
from lockstep.cli.serving.sources import WorkerRows, WorkerSource
from lockstep.cli.serving.state_dir import KeptState, in_memory, open_state
from lockstep.http.server import admin_token, run, say_ready, stop_event
from lockstep.running_gateways import RunningGateway, registered
from lockstep.settings import Settings
from lockstep.tokens.errors import LockstepError, Unavailable


def run_gateway(
    source: WorkerSource,
    arguments: GatewayArguments,
    settings: Settings,
    model_dir: Path | None = None,
) -> None:
    """Serves the workers of `source` until SIGTERM or SIGINT. `model_dir` holds the weights that
    they start with, where that is known. Raises the LockstepError that keeps it from starting."""
    run(_main(source, arguments, settings, model_dir))


async def _main(
    source: WorkerSource,
    arguments: GatewayArguments,
    settings: Settings,
    model_dir: Path | None,
) -> None:
    arguments.options(settings, "memory").check()  # before anything is started
    stop = stop_event()
    status = Status("Starting", console=Console(stderr=True, quiet=arguments.as_json))
    ready = asyncio.Event()
    living = asyncio.create_task(_live(source, arguments, settings, model_dir, status, ready, stop))
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait((living, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not ready.is_set():
        living.cancel()  # it serves nobody yet; an error that ended it is raised below
    with suppress(asyncio.CancelledError):
        await living


async def _live(
    source: WorkerSource,
    arguments: GatewayArguments,
    settings: Settings,
    model_dir: Path | None,
    status: Status,
    ready: asyncio.Event,
    stop: asyncio.Event,
) -> None:
    from lockstep.fleet.fleet import Fleet
    from lockstep.gateway.app import serve_gateway

    with ExitStack() as stack:
        stack.enter_context(status)
        model = None if in_memory(arguments) else await source.identity()
        kept = stack.enter_context(
            open_state(arguments, model, starts_workers=source.starts_workers)
        )
        _tell_state(kept, status.console)
        token, made = stack.enter_context(admin_token(settings.admin_token))
        token_file = made or _text(settings.admin_token_file)
        fleet = Fleet(
            arguments.pool(),
            kept.store,
            roots=arguments.checkpoint_root or (),
            model_dir=model_dir,
        )
        try:
            async with source.joined(fleet, token, status.update) as workers:
                name = (await fleet.pool.models())[0].id

                def on_ready(url: str, admin_url: str) -> None:
                    ready.set()
                    status.stop()
                    entry = RunningGateway(
                        url, admin_url, name, os.getpid(), token_file, _text(kept.directory)
                    )
                    stack.enter_context(registered(entry))
                    _Ready(entry, workers, bool(settings.api_keys), kept).tell(arguments.as_json)

                await serve_gateway(
                    fleet=fleet,
                    options=replace(arguments.options(settings, kept.sessions), admin_token=token),
                    on_ready=on_ready,
                    stop=stop,
                )
        except Unavailable as error:
            raise _with_hint(error, kept) if not ready.is_set() else error from None


@dataclass(frozen=True, slots=True)
class _Ready:
    """What the command prints when the gateway serves."""

    gateway: RunningGateway
    workers: WorkerRows
    with_key: bool
    kept: KeptState

    def tell(self, as_json: bool) -> None:
        """One JSON line for a program, or where it listens and a command to paste."""
        gateway = self.gateway
        if as_json:
            say_ready(
                url=gateway.url,
                admin_url=gateway.admin_url,
                admin_token_file=gateway.token_file,
                state_dir=gateway.state_dir,
                resumed=self.kept.resumed,
                workers=self.workers,
            )
            return
        out = Console(highlight=False)
        out.print(
            f"[bold green]Ready[/]: [bold]{gateway.url}[/] serves {gateway.model}, workers: "
            f"{len(self.workers)}"
        )
        token = gateway.token_file or "LOCKSTEP_ADMIN_TOKEN"
        out.print(f"Admin: [bold]{gateway.admin_url}[/], token in {token}", soft_wrap=True)
        body = {"model": gateway.model,
                "messages": [{"role": "user", "content": "Reverse: 40213"}]}  # fmt: skip
        headers = "-H 'content-type: application/json'"
        if self.with_key:
            headers += ' -H "authorization: Bearer ${LOCKSTEP_API_KEYS%%,*}"'
        command = (
            f"curl {gateway.url}/v1/chat/completions {headers} -d {shlex.quote(json.dumps(body))}"
        )
        out.print("\nTry:", command, soft_wrap=True, markup=False)
        out.print("\n`lockstep state` shows the fleet. Ctrl-C stops it, after the requests that "
                  "are running.", soft_wrap=True)  # fmt: skip


def _tell_state(kept: KeptState, console: Console) -> None:
    """Prints where the state is, and what it resumes of an earlier run."""
    if kept.directory is None:
        console.print("State and sessions are in memory: they end with this process.")
        return
    console.print(f"State: {kept.directory}", soft_wrap=True, highlight=False, markup=False)
    if kept.put_aside is not None:
        console.print(
            f"The earlier state was moved to {kept.put_aside}.",
            soft_wrap=True, highlight=False, markup=False,
        )  # fmt: skip
    if kept.resumed is not None:
        console.print(
            f"{_resuming(kept)}; --fresh starts over.",
            soft_wrap=True, highlight=False, markup=False,
        )  # fmt: skip


def _resuming(kept: KeptState) -> str:
    return f"Resuming version {kept.resumed} from {kept.checkpoint or kept.directory}"


def _with_hint(error: LockstepError, kept: KeptState) -> LockstepError:
    """The error of a failed start, with the way out where resumed state may be the cause."""
    if kept.resumed is None:
        return error
    return error.with_message(
        f"{error.message} (the fleet is brought to version {kept.resumed} of an earlier run, from "
        f"{kept.checkpoint or kept.directory}: --fresh starts over)"
    )


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
