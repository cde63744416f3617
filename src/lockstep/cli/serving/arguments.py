"""The options that every command with a gateway has: declared once, handed on as one value."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from lockstep.http.limits import DRAIN_SECONDS
from lockstep.tokens.errors import BadRequest

if TYPE_CHECKING:
    from lockstep.fleet.routing.pool import Pool
    from lockstep.gateway.app import GatewayOptions
    from lockstep.settings import Settings

LISTEN = "Listening"
TRAFFIC = "Traffic"
KEPT = "What is kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayArguments:
    """How a gateway listens, what it keeps and how much it takes at once."""

    tokenizer: Annotated[
        str | None,
        typer.Option(help="Bundled name or directory of the tokenizer; by default the model's."),
    ] = None
    checkpoint_root: Annotated[
        list[Path] | None, typer.Option(help="Directory weights may come from; repeat it.")
    ] = None
    state_dir: Annotated[
        str | None,
        typer.Option(
            help="Directory of the fleet's state and the sessions, or memory; by default one per "
            "model under ~/.local/state/lockstep.",
            rich_help_panel=KEPT,
        ),
    ] = None
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh",
            help="Start over: put what the state directory holds aside.",
            rich_help_panel=KEPT,
        ),
    ] = False
    sessions: Annotated[
        str | None,
        typer.Option(
            help="SQLite file of the sessions, or memory (then the state too, unless --state-dir "
            "says where); by default in the state directory.",
            rich_help_panel=KEPT,
        ),
    ] = None
    session_hours: Annotated[
        float,
        typer.Option(
            help="Hours after which a session that nobody used is deleted, if its samples were "
            "read.",
            rich_help_panel=KEPT,
        ),
    ] = 24.0
    expire_unread: Annotated[
        bool,
        typer.Option(
            "--expire-unread",
            help="Delete sessions after that time although nobody read their samples.",
            rich_help_panel=KEPT,
        ),
    ] = False
    host: Annotated[str, typer.Option(help="Address of the data port.", rich_help_panel=LISTEN)] = (
        "127.0.0.1"
    )
    port: Annotated[
        int, typer.Option(help="Data port; 0: any free one.", rich_help_panel=LISTEN)
    ] = 8000
    admin_port: Annotated[
        int,
        typer.Option(help="Port of the admin routes, on loopback; 0: any.", rich_help_panel=LISTEN),
    ] = 8001
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Serve other machines without LOCKSTEP_API_KEYS.",
            rich_help_panel=LISTEN,
        ),
    ] = False
    as_json: Annotated[
        bool, typer.Option("--json", help="Say ready in one JSON line.", rich_help_panel=LISTEN)
    ] = False
    drain_seconds: Annotated[
        float,
        typer.Option(
            help="How long answers that are under way may take after SIGTERM or Ctrl-C.",
            rich_help_panel=LISTEN,
        ),
    ] = DRAIN_SECONDS
    max_in_flight: Annotated[
        int, typer.Option(help="Most requests at once.", rich_help_panel=TRAFFIC)
    ] = 1024
    queue_limit: Annotated[
        int, typer.Option(help="Most requests that wait; then 429.", rich_help_panel=TRAFFIC)
    ] = 4096
    queue_seconds: Annotated[
        float, typer.Option(help="Longest wait; then 503.", rich_help_panel=TRAFFIC)
    ] = 60.0

    def check(self) -> None:
        """Raises BadRequest for a value that cannot be meant."""
        for name, value in (
            ("session_hours", self.session_hours),
            ("drain_seconds", self.drain_seconds),
        ):
            if not value >= 0:
                raise BadRequest(
                    f"--{name.replace('_', '-')} is {value}: expected 0 or more", param=name
                )

    def options(self, settings: Settings, sessions: str) -> GatewayOptions:
        """The gateway's own options, with its sessions at that place."""
        from lockstep.gateway.app import GatewayOptions

        return GatewayOptions(
            host=self.host,
            port=self.port,
            admin_port=self.admin_port,
            api_keys=settings.api_keys,
            sessions=sessions,
            session_seconds=self.session_hours * 3600,
            expire_unread=self.expire_unread,
            tokenizer=self.tokenizer,
            insecure=self.insecure,
            drain_seconds=self.drain_seconds,
        )

    def pool(self) -> Pool:
        """The pool that traffic goes through."""
        from lockstep.fleet.routing.pool import Pool

        return Pool(
            max_in_flight=self.max_in_flight,
            queue_limit=self.queue_limit,
            queue_seconds=self.queue_seconds,
        )


def takes_gateway_arguments(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameter `arguments` is filled from the options above, beside its own."""
    hints = get_type_hints(GatewayArguments, include_extras=True)
    names = [field.name for field in fields(GatewayArguments)]
    own = [
        parameter
        for parameter in inspect.signature(command, eval_str=True).parameters.values()
        if parameter.name != "arguments"
    ]
    shared = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in fields(GatewayArguments)
    ]

    def run(**given: Any) -> None:
        arguments = GatewayArguments(**{name: given.pop(name) for name in names})
        arguments.check()
        command(**given, arguments=arguments)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    parameters = [*own, *shared]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run
