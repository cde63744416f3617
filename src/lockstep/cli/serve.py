"""`lockstep serve` and `lockstep gateway`: one URL in front of workers, its own or others'."""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.status import Status

from lockstep.settings import Settings
from lockstep.tokens.errors import Unavailable
from lockstep.wire.server import admin_token, run, say_ready, stop_event

if TYPE_CHECKING:
    from lockstep.fleet.pool import Pool
    from lockstep.gateway.app import GatewayOptions

log = logging.getLogger(__name__)

LISTEN = "Listening"
TRAFFIC = "Traffic"
SESSIONS = "lockstep-sessions.sqlite"


class Dialect(StrEnum):
    VLLM = "vllm"
    DYNAMO = "dynamo"
    DYNAMO_GENERATE = "dynamo-generate"
    SGLANG = "sglang"


class Logprobs(StrEnum):
    RAW = "raw"
    PROCESSED = "processed"


Host = Annotated[str, typer.Option(help="Address of the data port.", rich_help_panel=LISTEN)]
Port = Annotated[int, typer.Option(help="Data port; 0: any free one.", rich_help_panel=LISTEN)]
AdminPort = Annotated[
    int,
    typer.Option(help="Port of the admin routes, on loopback; 0: any.", rich_help_panel=LISTEN),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="Serve other machines without LOCKSTEP_API_KEYS.",
        rich_help_panel=LISTEN,
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Say ready in one JSON line.", rich_help_panel=LISTEN)
]
SessionsAt = Annotated[str, typer.Option(help="SQLite file that keeps sessions, or memory.")]
MaxInFlight = Annotated[int, typer.Option(help="Most requests at once.", rich_help_panel=TRAFFIC)]
QueueLimit = Annotated[
    int, typer.Option(help="Most requests that wait; then 429.", rich_help_panel=TRAFFIC)
]
QueueSeconds = Annotated[
    float, typer.Option(help="Longest wait; then 503.", rich_help_panel=TRAFFIC)
]


def serve(
    model: Annotated[
        str, typer.Argument(help="tiny, tiny-moe, or a Hugging Face model directory.")
    ] = "tiny",
    workers: Annotated[int, typer.Option(help="Worker processes.")] = 1,
    worker_args: Annotated[
        str, typer.Option(help="Options for each of them, as `lockstep worker` takes them.")
    ] = "",
    tokenizer: Annotated[
        str | None, typer.Option(help="Directory of the tokenizer; by default the model's.")
    ] = None,
    sessions: SessionsAt = SESSIONS,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    admin_port: AdminPort = 8001,
    insecure: Insecure = False,
    as_json: Json = False,
    max_in_flight: MaxInFlight = 1024,
    queue_limit: QueueLimit = 4096,
    queue_seconds: QueueSeconds = 60.0,
) -> None:
    """Start workers and a gateway in front of them: one URL for every kind of client."""
    from lockstep.fleet.pool import Pool
    from lockstep.gateway.app import GatewayOptions

    settings = Settings.read()
    options = GatewayOptions(
        host=host,
        port=port,
        admin_port=admin_port,
        api_keys=settings.api_keys,
        sessions=sessions,
        tokenizer=tokenizer or model,
        insecure=insecure,
    )
    pool = Pool(max_in_flight=max_in_flight, queue_limit=queue_limit, queue_seconds=queue_seconds)
    source = _Embedded(model, workers, tuple(shlex.split(worker_args)))
    run(_main(source, pool, options, settings, as_json))


def gateway(
    worker: Annotated[list[str], typer.Option(help="URL of a running worker; repeat it.")],
    transport: Annotated[
        Dialect | None, typer.Option(help="What they speak; by default they are asked.")
    ] = None,
    logprobs_mode: Annotated[
        Logprobs | None, typer.Option(help="How they compute logprobs, if they do not say it.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Directory of the tokenizer; by default the model's name.")
    ] = None,
    wait_seconds: Annotated[float, typer.Option(help="How long to wait for workers.")] = 60.0,
    sessions: SessionsAt = SESSIONS,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    admin_port: AdminPort = 8001,
    insecure: Insecure = False,
    as_json: Json = False,
    max_in_flight: MaxInFlight = 1024,
    queue_limit: QueueLimit = 4096,
    queue_seconds: QueueSeconds = 60.0,
) -> None:
    """Put one URL in front of workers that run already."""
    from lockstep.fleet.pool import Pool
    from lockstep.gateway.app import GatewayOptions

    settings = Settings.read()
    options = GatewayOptions(
        host=host,
        port=port,
        admin_port=admin_port,
        api_keys=settings.api_keys,
        sessions=sessions,
        tokenizer=tokenizer,
        insecure=insecure,
    )
    pool = Pool(max_in_flight=max_in_flight, queue_limit=queue_limit, queue_seconds=queue_seconds)
    added: dict[str, Any] = {"api_key": settings.worker_api_key}
    if transport is not None:
        added["transport"] = transport.value
    if logprobs_mode is not None:
        added["logprob_mode"] = logprobs_mode.value
    source = _Running(tuple(worker), added, wait_seconds)
    run(_main(source, pool, options, settings, as_json))


Row = dict[str, object]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Embedded:
    """Workers of this command's own."""

    model: str
    count: int
    arguments: tuple[str, ...]

    @asynccontextmanager
    async def joined(self, pool: Pool, token: str, say: Say) -> AsyncIterator[list[Row]]:
        """They serve in `pool`, both while the block runs."""
        from lockstep.gateway.supervisor import Child, Supervisor

        def count_up(_: Child) -> None:
            up = sum(child.state == "running" for child in fleet.children)
            say(f"Starting {self.model}: {up} of {self.count} workers are ready")

        fleet = Supervisor(
            self.model,
            self.count,
            admin_token=token,
            arguments=self.arguments,
            on_ready=count_up,
            on_restart=lambda child: pool.check(child.id),
        )
        say(f"Starting {self.model}: 0 of {self.count} workers are ready")
        async with fleet, pool:  # the pool is left first, or it would see its workers die
            await fleet.ready()
            for child in fleet.children:
                await pool.add(child.url, worker_id=child.id, transport="vllm")
            await pool.wait_ready(self.count, 30.0)
            yield [
                {"id": one.id, "url": one.url, "system_url": one.system_url, "pid": one.pid}
                for one in fleet.children
            ]


@dataclass(frozen=True, slots=True)
class _Running:
    """Workers that somebody else started."""

    urls: tuple[str, ...]
    added: dict[str, Any]
    wait_seconds: float

    @asynccontextmanager
    async def joined(self, pool: Pool, token: str, say: Say) -> AsyncIterator[list[Row]]:
        """They serve in `pool`; those that do not answer in time join when they do."""
        say(f"Connecting to {', '.join(self.urls)}")
        async with pool:
            for url in self.urls:
                await pool.add(url, **self.added)
            try:
                await pool.wait_ready(len(self.urls), self.wait_seconds)
            except Unavailable as error:
                if not any(worker.state == "serving" for worker in pool.workers):
                    raise
                log.warning("%s", error.message)
            yield [
                {"id": one.id, "url": one.url, "system_url": None, "pid": None}
                for one in pool.workers
            ]


async def _main(
    source: _Embedded | _Running,
    pool: Pool,
    options: GatewayOptions,
    settings: Settings,
    as_json: bool,
) -> None:
    from lockstep.gateway.app import serve_gateway

    options.check()  # before anything is started
    stop = stop_event()
    status = Status("Starting", console=Console(stderr=True, quiet=as_json))

    ready = False

    async def life() -> None:
        with status, admin_token(settings.admin_token) as (token, token_file):
            async with source.joined(pool, token, status.update) as workers:
                model = (await pool.models())[0].id

                def on_ready(url: str, admin_url: str) -> None:
                    nonlocal ready
                    ready = True
                    status.stop()
                    if as_json:
                        say_ready(url=url, admin_url=admin_url, admin_token_file=token_file,
                                  workers=workers)  # fmt: skip
                    else:
                        _show(url, admin_url, token_file, model, workers, bool(options.api_keys))

                await serve_gateway(
                    pool=pool,
                    options=replace(options, admin_token=token),
                    on_ready=on_ready,
                    stop=stop,
                )

    living = asyncio.create_task(life())
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait((living, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not ready:
        living.cancel()  # nobody waits for an answer yet; an error that ended it is raised below
    with suppress(asyncio.CancelledError):
        await living


def _show(
    url: str,
    admin_url: str,
    token_file: str | None,
    model: str,
    workers: Sequence[Row],
    with_key: bool,
) -> None:
    """Where it listens, and a command that can be pasted."""
    out = Console(highlight=False)
    out.print(f"[bold green]Ready[/]: [bold]{url}[/] serves {model}, workers: {len(workers)}")
    token = token_file or "LOCKSTEP_ADMIN_TOKEN"
    out.print(f"Admin: [bold]{admin_url}[/], token in {token}")
    question = {"model": model, "messages": [{"role": "user", "content": "Reverse: 40213"}]}
    headers = "-H 'content-type: application/json'"
    if with_key:
        headers += ' -H "authorization: Bearer ${LOCKSTEP_API_KEYS%%,*}"'
    body = shlex.quote(json.dumps(question))
    out.print("\nTry:", f"curl {url}/v1/chat/completions {headers} -d {body}",
              soft_wrap=True, markup=False)  # fmt: skip
    out.print("\nCtrl-C stops it, after the answers that are under way.")
