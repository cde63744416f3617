"""`lockstep serve` and `lockstep gateway`: one URL in front of workers, its own or others'."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.status import Status

from lockstep.cli.dynamo import DynamoWorkers
from lockstep.models import bundled
from lockstep.settings import Settings
from lockstep.tokens.errors import BadRequest, Unavailable
from lockstep.wire.server import admin_token, run, say_ready, stop_event

if TYPE_CHECKING:
    from lockstep.cli.vllm import VllmElsewhere, VllmWorkers
    from lockstep.fleet.fleet import Fleet
    from lockstep.fleet.pool import Pool
    from lockstep.gateway.app import GatewayOptions

log = logging.getLogger(__name__)

LISTEN = "Listening"
TRAFFIC = "Traffic"
SESSIONS = "lockstep-sessions.sqlite"
STATE = "lockstep-state.sqlite"


class Engine(StrEnum):
    LOCKSTEP = "lockstep"
    VLLM = "vllm"


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
StateAt = Annotated[
    str | None,
    typer.Option(
        help="SQLite file that keeps the fleet's desired state, or memory; by default "
        f"{STATE}, or memory where the sessions are."
    ),
]
Roots = Annotated[
    list[Path] | None,
    typer.Option("--checkpoint-root", help="Directory weights may come from; repeat it."),
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
    vllm_args: Annotated[
        list[str] | None, typer.Argument(help="vLLM's own options, after --.")
    ] = None,
    engine: Annotated[
        Engine, typer.Option(help="The embedded engine, or vLLM servers.")
    ] = Engine.LOCKSTEP,
    worker: Annotated[
        list[str] | None,
        typer.Option(help="With --engine vllm: URL of a running server; repeat it."),
    ] = None,
    workers: Annotated[int, typer.Option(help="Worker processes.")] = 1,
    worker_args: Annotated[
        str, typer.Option(help="Options for each of them, as `lockstep worker` takes them.")
    ] = "",
    tokenizer: Annotated[
        str | None, typer.Option(help="Directory of the tokenizer; by default the model's.")
    ] = None,
    sessions: SessionsAt = SESSIONS,
    state: StateAt = None,
    checkpoint_root: Roots = None,
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
    if engine is Engine.VLLM:
        source: Source = _vllm(model, workers, tuple(worker or ()), vllm_args or (), settings)
    elif worker or vllm_args:
        raise BadRequest("--worker and options after -- need --engine vllm", param="engine")
    else:
        source = _Embedded(model, workers, tuple(shlex.split(worker_args)))
    kept = _Kept.of(state, sessions, checkpoint_root, bundled(model) or Path(model))
    run(_main(source, pool, kept, options, settings, as_json))


def gateway(
    worker: Annotated[
        list[str] | None,
        typer.Option(help="URL of a running worker, or URL,ADMIN_URL; repeat it."),
    ] = None,
    dynamo: Annotated[
        str | None,
        typer.Option(help="URL of a Dynamo frontend, whose workers are found on DYN_RL_PORT."),
    ] = None,
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
    state: StateAt = None,
    checkpoint_root: Roots = None,
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
    if bool(worker) == bool(dynamo):
        raise BadRequest("give --worker or --dynamo, one of them", param="worker")
    source: Source
    if dynamo:
        source = DynamoWorkers(dynamo, added, wait_seconds)
    else:
        source = _Running(tuple(worker or ()), added, wait_seconds)
    kept = _Kept.of(state, sessions, checkpoint_root)
    _leave_torch()
    run(_main(source, pool, kept, options, settings, as_json))


Row = dict[str, object]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Kept:
    """What the fleet remembers and where weights may come from."""

    state: str
    roots: Sequence[Path]
    model_dir: Path | None = None

    @classmethod
    def of(
        cls,
        state: str | None,
        sessions: str,
        roots: Sequence[Path] | None,
        model_dir: Path | None = None,
    ) -> _Kept:
        """`state` defaults to memory where the sessions are there too, else to a file."""
        where = state or ("memory" if sessions == "memory" else STATE)
        return cls(where, roots or (), model_dir)

    def fleet(self, pool: Pool) -> Fleet:
        from lockstep.fleet.desired import StateStore
        from lockstep.fleet.fleet import Fleet

        return Fleet(pool, StateStore(self.state), roots=self.roots, model_dir=self.model_dir)


@dataclass(frozen=True, slots=True)
class _Embedded:
    """Workers of this command's own."""

    model: str
    count: int
    arguments: tuple[str, ...]

    @asynccontextmanager
    async def joined(self, fleet: Fleet, token: str, say: Say) -> AsyncIterator[list[Row]]:
        """They serve in the fleet, both while the block runs."""
        from lockstep.backends.admin_lockstep import LockstepAdmin
        from lockstep.gateway.supervisor import Child, Supervisor

        pool = fleet.pool

        def count_up(_: Child) -> None:
            up = sum(child.state == "running" for child in children.children)
            say(f"Starting {self.model}: {up} of {self.count} workers are ready")

        def restarted(child: Child) -> None:
            if any(worker.id == child.id for worker in pool.workers):  # it may be drained
                pool.leave_out(child.id, "it was restarted")

        children = Supervisor(
            self.model,
            self.count,
            admin_token=token,
            arguments=self.arguments,
            on_ready=count_up,
            on_restart=restarted,
        )
        say(f"Starting {self.model}: 0 of {self.count} workers are ready")
        async with children, pool, fleet:  # left in turn, or the pool would see its workers die
            await children.ready()
            for child in children.children:
                admin = LockstepAdmin(child.system_url, token)
                await fleet.add(child.url, admin, worker_id=child.id)
            await pool.wait_ready(self.count, 30.0)
            yield [
                {"id": one.id, "url": one.url, "system_url": one.system_url, "pid": one.pid}
                for one in children.children
            ]


@dataclass(frozen=True, slots=True)
class _Running:
    """Workers that somebody else started."""

    urls: tuple[str, ...]
    added: dict[str, Any]
    wait_seconds: float

    @asynccontextmanager
    async def joined(self, fleet: Fleet, token: str, say: Say) -> AsyncIterator[list[Row]]:
        """They serve in the fleet; those that do not answer in time join when they do.

        URL,ADMIN_URL names a worker's control port too, for which `token` is used: only then can
        its weights be updated from here.
        """
        from lockstep.backends.admin_open import open_admin

        pool = fleet.pool
        say(f"Connecting to {', '.join(self.urls)}")
        async with pool, fleet:
            for url in self.urls:
                data_url, _, admin_url = url.partition(",")
                if admin_url:
                    await fleet.add(data_url, await open_admin(admin_url, token), **self.added)
                else:
                    await pool.add(data_url, **self.added)
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


Source: TypeAlias = "_Embedded | _Running | VllmWorkers | VllmElsewhere | DynamoWorkers"


def _vllm(
    model: str, count: int, urls: tuple[str, ...], arguments: Sequence[str], settings: Settings
) -> VllmWorkers | VllmElsewhere:
    from lockstep.cli.vllm import VllmElsewhere, VllmWorkers
    from lockstep.gateway.vllm_server import find_python

    if urls:
        return VllmElsewhere(urls, settings.worker_api_key)
    return VllmWorkers(model, count, tuple(arguments), find_python(settings.vllm_python))


async def _main(
    source: Source,
    pool: Pool,
    kept: _Kept,
    options: GatewayOptions,
    settings: Settings,
    as_json: bool,
) -> None:
    from lockstep.gateway.app import serve_gateway

    fleet = kept.fleet(pool)

    options.check()  # before anything is started
    stop = stop_event()
    status = Status("Starting", console=Console(stderr=True, quiet=as_json))

    ready = False

    async def life() -> None:
        with status, admin_token(settings.admin_token) as (token, token_file):
            async with source.joined(fleet, token, status.update) as workers:
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
                    fleet=fleet,
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


def _leave_torch() -> None:
    """Keeps transformers from loading torch where it is installed: a gateway without workers of
    its own only tokenizes, and torch would be half of its memory."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
