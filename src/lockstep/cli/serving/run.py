"""A gateway process: open its state, add the workers, serve, and drain at the end."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.status import Status

from lockstep.cli.serving.arguments import GatewayArguments
from lockstep.cli.serving.prime_rl import prime_rl_key, prime_rl_toml
from lockstep.cli.serving.shared_store import advertised
from lockstep.cli.serving.siblings import SiblingGateways
from lockstep.cli.serving.sources import (
    StartedWorker,
    StartsWorkers,
    WorkerRows,
    WorkerSource,
)
from lockstep.cli.serving.state_dir import GatewayState, check_inside, check_roots, open_state
from lockstep.cli.serving.trainer_view import attachment_of, print_trainer, trainer_fields
from lockstep.running_gateways import RunningGateway, registered
from lockstep.settings import TRACE, Settings
from lockstep.tokens.errors import LockstepError, Unavailable
from lockstep.tracing import traced

if TYPE_CHECKING:
    from lockstep.fleet.fleet import Fleet
    from lockstep.gateway.context import GatewayContext
    from lockstep.gateway.metrics import GatewayMetrics
    from lockstep.gateway.options import GatewayOptions
    from lockstep.integrations.tinker.attached import AttachedTrainer
    from lockstep.integrations.tinker.options import TrainerOptions


@dataclass(frozen=True, slots=True)
class GatewayProcess:
    """A gateway in front of the workers of `source`.

    `model_dir` holds the weights that the workers start with, if known. With `trainer` the gateway
    also has the routes of the Tinker API. `flags` are the options by which a gateway in another
    process finds the same workers, if there are such options.
    """

    source: WorkerSource
    arguments: GatewayArguments
    settings: Settings
    model_dir: Path | None = None
    trainer: TrainerOptions | None = None
    flags: tuple[str, ...] | None = None

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT. Raises the LockstepError that prevents the start."""
        from lockstep.http.server.server import run

        on = self.arguments.trace or self.settings.trace
        if on:
            os.environ[TRACE] = "1"  # for the workers that this process starts
        with traced("lockstep-gateway", on=on):
            run(self._main())

    async def _main(self) -> None:
        from lockstep.http.server.server import stop_event

        if (self.arguments.store or self.settings.store) is None:
            # Check before anything is started. With a store, its keys must be read first.
            self.arguments.options(self.settings).check()
        self.arguments.budgets()
        check_roots(self.arguments.checkpoint_root)
        siblings = SiblingGateways(self.arguments, self.settings)
        stop, ready = stop_event(), asyncio.Event()
        started = isinstance(self.source, StartsWorkers) and self.trainer is None
        if self.arguments.gateways > 1 and (started or self.flags is not None):
            serving = asyncio.create_task(self._supervise(ready, stop))
        else:
            serving = asyncio.create_task(self._serve(ready, stop, siblings))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait((serving, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not ready.is_set():
            serving.cancel()  # no client is served yet; an error that ended it is raised below
        with suppress(asyncio.CancelledError):
            await serving

    async def _supervise(self, ready: asyncio.Event, stop: asyncio.Event) -> None:
        """Run `--gateways N` processes, and the workers of `serve`, until `stop` is set."""
        from lockstep.cli.serving.gateway_group import GatewayGroup, register_workers

        arguments, settings, source = self.arguments, self.settings, self.source
        status = Status("Starting", console=Console(stderr=True, quiet=arguments.as_json))
        async with AsyncExitStack() as stack:
            stack.enter_context(status)
            # Opened for its checks only; the gateways open it themselves.
            async with open_state(arguments, settings, source) as state:
                if not arguments.fresh:
                    check_inside(await state.store.control.desired(), arguments.checkpoint_root)
                options = arguments.options(settings, state.store)
                options.check()
            _print_state(state, status.console)
            token = settings.admin_token or ""  # open_state has refused a store without one
            workers: list[StartedWorker] = []
            flags = self.flags
            if flags is None and isinstance(source, StartsWorkers):
                workers = await stack.enter_async_context(source.started(token, status.update))
                flags = ("--workers-join",)
            group = GatewayGroup(arguments, settings, token, flags or (), self.model_dir)
            first = await stack.enter_async_context(group.running())
            if workers:
                await register_workers(first["admin_url"], token, workers)
            ready.set()
            status.stop()
            rows = [worker.row for worker in workers] or first["workers"]
            entry = RunningGateway(
                first["url"],
                first["admin_url"],
                Path(arguments.gateway.tokenizer or "model").name,
                os.getpid(),
                _text(settings.admin_token_file),
            )
            if arguments.as_json:
                _print_ready_json(entry, rows, state, None)
            else:
                _print_ready(entry, len(rows), _key_to_paste(options))
                if arguments.prime_rl:
                    _print_prime_rl(entry, arguments, options)
            await stop.wait()

    async def _serve(
        self, ready: asyncio.Event, stop: asyncio.Event, siblings: SiblingGateways
    ) -> None:
        from lockstep.dashboard.app import Dashboard
        from lockstep.fleet.fleet import Fleet
        from lockstep.gateway.app import serve_gateway
        from lockstep.http.server.server import admin_token

        arguments, settings, source = self.arguments, self.settings, self.source
        status = Status("Starting", console=Console(stderr=True, quiet=arguments.as_json))
        async with AsyncExitStack() as stack:
            stack.enter_context(status)
            state = await stack.enter_async_context(open_state(arguments, settings, source))
            store = state.store
            _print_state(state, status.console)
            token, token_path = stack.enter_context(admin_token(settings.admin_token))
            token_file = token_path or _text(settings.admin_token_file)
            runs = self._runs(state, stack)
            roots = tuple(arguments.checkpoint_root)
            roots = (*roots, str(runs)) if roots and runs else roots
            if not arguments.fresh:
                check_inside(await store.control.desired(), roots)
            fleet = Fleet(
                arguments.make_pool(settings),
                store.control,
                leadership=store.leadership,
                token=token,
                roots=roots,
                budget=arguments.budgets(),
                model_dir=self.model_dir,
                fresh=arguments.fresh,
                require_proof=arguments.require_proof,
            )
            options = replace(arguments.options(settings, store), admin_token=token)
            try:
                async with (
                    source.joined(fleet, token, status.update) as workers,
                    self._attached(fleet, runs, stop) as attached,
                ):
                    name = await _model_name(fleet, arguments.gateway.tokenizer)

                    def on_ready(url: str, admin_url: str) -> None:
                        if store.shared:
                            store.leadership.announce(advertised(arguments, admin_url))
                        siblings.start(url, token, stop)
                        ready.set()
                        status.stop()
                        entry = RunningGateway(
                            url, admin_url, name, os.getpid(), token_file, _text(state.directory),
                            gpus=_gpus(workers),
                        )  # fmt: skip
                        stack.enter_context(registered(entry))
                        if arguments.as_json:
                            _print_ready_json(entry, workers, state, attached)
                        else:
                            _print_ready(entry, len(workers), _key_to_paste(options))
                            if attached is not None:
                                print_trainer(attached, url, options)
                            if arguments.prime_rl:
                                _print_prime_rl(entry, arguments, options)

                    def dashboard(context: GatewayContext, metrics: GatewayMetrics) -> Dashboard:
                        return Dashboard(
                            context, fleet, metrics, token=token, stop=stop,
                            run_dir=arguments.run_dir,
                        )  # fmt: skip

                    try:
                        await serve_gateway(
                            fleet=fleet,
                            options=options,
                            on_ready=on_ready,
                            stop=stop,
                            dashboard=dashboard,
                            attachment=None if attached is None else attachment_of(attached),
                        )
                    finally:
                        await siblings.ended(stop)
            except Unavailable as error:
                raise _with_hint(error, state) if not ready.is_set() else error from None

    def _runs(self, state: GatewayState, stack: AsyncExitStack) -> Path | None:
        """Return the directory of training runs; with state in memory, it is deleted at the end."""
        if self.trainer is None:
            return None
        if state.directory is not None:
            return state.directory / "tinker"
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-tinker-")))

    @asynccontextmanager
    async def _attached(
        self, fleet: Fleet, runs: Path | None, stop: asyncio.Event
    ) -> AsyncIterator[AttachedTrainer | None]:
        """Run the trainer of this process, if it has one, while the block runs."""
        if self.trainer is None or runs is None:
            yield None
            return
        from lockstep.integrations.tinker.attached import attached_trainer

        async with attached_trainer(self.trainer, fleet, runs, stop) as attached:
            yield attached


async def _model_name(fleet: Fleet, tokenizer: str | None) -> str:
    """Return the name of the served model, or that of its tokenizer before the first worker
    joins.
    """
    try:
        return (await fleet.pool.models())[0].id
    except Unavailable:
        if tokenizer is None:
            raise
        return Path(tokenizer).name


def _print_ready_json(
    gateway: RunningGateway,
    workers: WorkerRows,
    state: GatewayState,
    attached: AttachedTrainer | None,
) -> None:
    from lockstep.http.server.server import say_ready

    say_ready(
        **({} if attached is None else {"trainer": trainer_fields(attached)}),
        url=gateway.url,
        admin_url=gateway.admin_url,
        admin_token_file=gateway.token_file,
        state_dir=gateway.state_dir,
        resumed=state.resumed,
        workers=workers,
    )


def _key_to_paste(options: GatewayOptions) -> str | None:
    """Return a shell expression for an API key, or None if no key is needed."""
    if options.api_keys:
        return "${LOCKSTEP_API_KEYS%%,*}"
    return None if options.key_file is None else "$KEY"


def _print_ready(gateway: RunningGateway, workers: int, key: str | None) -> None:
    """Print where the gateway listens, and a command to paste."""
    out = Console(highlight=False)
    out.print(
        f"[bold green]Ready[/]: [bold]{gateway.url}[/] serves {gateway.model}, workers: {workers}"
    )
    token = gateway.token_file or "LOCKSTEP_ADMIN_TOKEN"
    out.print(f"Admin: [bold]{gateway.admin_url}[/], token in {token}", soft_wrap=True)
    message = {"role": "user", "content": "Reverse: 40213"}
    body = shlex.quote(json.dumps({"model": gateway.model, "messages": [message]}))
    headers = "-H 'content-type: application/json'"
    if key is not None:
        headers += f' -H "authorization: Bearer {key}"'
    command = f"curl {gateway.url}/v1/chat/completions {headers} -d {body}"
    out.print("\nTry:", command, soft_wrap=True, markup=False)
    out.print(
        "\n`lockstep dashboard` opens a live page, `lockstep state` shows the fleet. Press Ctrl-C "
        "to stop. Running requests finish first.",
        soft_wrap=True,
    )


def _print_prime_rl(
    gateway: RunningGateway, arguments: GatewayArguments, options: GatewayOptions
) -> None:
    """Print the lines of prime-rl's configuration, and how prime-rl gets its key."""
    roots = tuple(map(str, arguments.checkpoint_root))
    keys = bool(options.api_keys or options.key_file)
    text = f"\n{prime_rl_toml(gateway, roots)}\n\n{prime_rl_key(gateway, keys=keys)}\n"
    Console(highlight=False).print(text, soft_wrap=True, markup=False)


def _print_state(state: GatewayState, console: Console) -> None:
    """Print the path of the state, and the version that is resumed from an earlier run."""
    if state.directory is None and not state.store.shared:
        console.print("State and sessions are in memory and end with this process.")
        return
    lines = ["State: in the store" if state.directory is None else f"State: {state.directory}"]
    if state.set_aside is not None:
        lines.append(f"The earlier state was moved to {state.set_aside}.")
    if state.resumed is not None:
        where = state.checkpoint or state.directory or "the model's own weights"
        lines.append(f"Resuming version {state.resumed} from {where}; --fresh starts over.")
    console.print("\n".join(lines), soft_wrap=True, highlight=False, markup=False)


def _with_hint(error: LockstepError, state: GatewayState) -> LockstepError:
    """Add a hint to the error of a failed start if resumed state may be the cause."""
    if state.resumed is None:
        return error
    return error.with_message(
        f"{error.message} (the fleet is brought to version {state.resumed} of an earlier run, from "
        f"{state.checkpoint or state.directory or 'its store'}: --fresh starts over)"
    )


def _gpus(workers: WorkerRows) -> dict[str, tuple[str, ...]]:
    """Return the GPUs of the workers that were placed, by worker id."""
    return {
        str(row["id"]): gpus
        for row in workers
        if isinstance(gpus := row.get("gpus"), tuple) and gpus
    }


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
