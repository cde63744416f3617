"""`lockstep dynamo up`: a Dynamo frontend and workers on this machine, alone or as one of many."""

from __future__ import annotations

import asyncio
import json
import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.status import Status

from lockstep.cli.derived_flags import ModelArgument, with_flags
from lockstep.cli.dynamo_network import DynamoNetwork

if TYPE_CHECKING:
    from lockstep.launch.local_dynamo import LocalDynamo
    from lockstep.launch.supervisor import Child

app = typer.Typer(no_args_is_help=True, help="NVIDIA Dynamo with Lockstep's workers.")


@app.callback()
def dynamo() -> None:
    """NVIDIA Dynamo with Lockstep's workers."""


@app.command()
@with_flags
def up(
    model: ModelArgument = "tiny",
    workers: Annotated[
        int, typer.Option(help="Number of worker processes; 0 with --discovery: only a frontend.")
    ] = 1,
    frontend: Annotated[
        bool, typer.Option(help="Start a frontend on this machine, or only workers.")
    ] = True,
    worker_args: Annotated[
        str, typer.Option(help="Options of `lockstep worker` for every worker, in one string.")
    ] = "",
    host: Annotated[
        str, typer.Option(help="Address the frontend listens on; it has no API keys.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the frontend; 0: any free port.")] = 8000,
    rl_port: Annotated[
        int, typer.Option(help="Port where the frontend lists its workers; 0: any free port.")
    ] = 8001,
    python: Annotated[
        Path | None,
        typer.Option(
            help="Python interpreter of an environment with Dynamo; by default this one, or "
            ".venv-dynamo."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON line when ready, and nothing else.")
    ] = False,
    *,
    network: DynamoNetwork,
) -> None:
    """Start a Dynamo frontend and workers with the embedded engine on this machine.

    The processes find each other through a temporary directory: neither etcd nor NATS is needed.
    With --discovery they join a deployment of several hosts. A process that dies is restarted.
    Press Ctrl-C to stop all of them.
    """
    from lockstep.http.server.server import run
    from lockstep.launch.interpreter import DYNAMO, find_python
    from lockstep.launch.local_dynamo import LocalDynamo

    status = Status("Starting Dynamo", console=Console(stderr=True, quiet=as_json))

    def count_up(_: Child) -> None:
        up = sum(worker.ready.done() for worker in deployment.workers)
        status.update(f"Starting {model}: {up} of {workers} workers ready")

    deployment = LocalDynamo(
        model,
        workers,
        python=find_python(DYNAMO, python),
        network=network.environ() if network.given else None,
        with_frontend=frontend,
        host=host,
        port=port,
        rl_port=rl_port,
        arguments=shlex.split(worker_args),
        on_ready=count_up,
    )
    run(_main(deployment, status, as_json))


async def _main(deployment: LocalDynamo, status: Status, as_json: bool) -> None:
    from lockstep.http.server.server import stop_event

    stop = asyncio.create_task(stop_event().wait())
    with status:
        async with deployment:
            ready = asyncio.create_task(deployment.ready())
            failed = asyncio.create_task(deployment.failed())
            waiting = {stop, ready, failed}
            try:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if ready.done():
                    await ready
                    status.stop()
                    _show(deployment, as_json)
                    await stop
                elif failed.done():
                    await failed
            finally:
                for task in waiting:
                    task.cancel()
                with suppress(asyncio.CancelledError):
                    await asyncio.gather(*waiting, return_exceptions=True)
                status.update("Stopping")


def _show(deployment: LocalDynamo, as_json: bool) -> None:
    """Print where the deployment listens, and commands to paste."""
    rows, frontend = deployment.rows, deployment.frontend
    if as_json:
        from lockstep.http.server.server import say_ready

        where = {} if frontend is None else {"url": frontend.url, "rl_url": frontend.system_url}
        say_ready(**where, pid=None if frontend is None else frontend.pid, workers=rows)
        return
    out = Console(highlight=False)
    if frontend is not None:
        _show_frontend(out, frontend, rows)
    else:
        out.print(f"[bold green]Ready[/]: {len(rows)} workers, for the frontends of the deployment")
        for row in rows:
            out.print(f"{row['name']}: {row['instance_id']}, {row['system_url']}", soft_wrap=True)
    out.print("\nPress Ctrl-C to stop. Running requests finish first.")


def _show_frontend(out: Console, frontend: Child, rows: list[dict[str, Any]]) -> None:
    model = rows[0]["model"] if rows else "MODEL"
    out.print(
        f"[bold green]Ready[/]: [bold]{frontend.url}[/] serves {model}, own workers: {len(rows)}"
    )
    out.print(f"Workers: [bold]{frontend.system_url}/v1/rl/workers[/]")
    port = frontend.system_url.rpartition(":")[2]
    question = {"model": model, "messages": [{"role": "user", "content": "Reverse: 40213"}]}
    body = shlex.quote(json.dumps(question))
    out.print(
        "\nTry:",
        f"curl {frontend.url}/v1/chat/completions -H 'content-type: application/json' -d {body}",
        "\nOr:",
        f"DYN_RL_PORT={port} lockstep gateway --dynamo {frontend.url} --port 0 --admin-port 0",
        soft_wrap=True,
        markup=False,
    )
