"""The options that `lockstep serve` and `lockstep gateway` share, declared once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.http.server.limits import DRAIN_SECONDS, LIMITS, parse_limits
from lockstep.http.tls import TlsFiles
from lockstep.protocol.json.strict import LIMITS as REQUEST_LIMITS
from lockstep.tokens.errors import BadRequest

if TYPE_CHECKING:
    from lockstep.fleet.fan_out import PhaseBudgets
    from lockstep.fleet.routing.pool import Pool
    from lockstep.gateway.app import GatewayOptions
    from lockstep.settings import Settings
    from lockstep.storage import Store

_listen_option = partial(typer.Option, rich_help_panel="Listening")
_traffic_option = partial(typer.Option, rich_help_panel="Traffic")
_state_option = partial(typer.Option, rich_help_panel="State and sessions")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayArguments:
    """How a gateway listens, what it stores and how many requests it takes at once."""

    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Bundled model or directory whose tokenizer is used; by default the model's."
        ),
    ] = None
    prime_rl: Annotated[
        bool,
        typer.Option("--prime-rl", help="Print the lines of prime-rl's configuration for it."),
    ] = False
    single_port: Annotated[
        bool,
        typer.Option(
            "--single-port",
            help="Take control calls on the data port as well, at the root and with the admin "
            "token, as prime-rl's elastic pool sends them.",
        ),
    ] = False
    checkpoint_root: Annotated[
        list[Path] | None,
        typer.Option(help="Directory that weights may be loaded from; may be repeated."),
    ] = None
    state_dir: Annotated[
        str | None,
        _state_option(
            help="Directory for the weight version and the sessions, or 'memory' to keep nothing; "
            "by default one for each model under ~/.local/state/lockstep."
        ),
    ] = None
    store: Annotated[
        str | None,
        _state_option(
            help="postgresql://USER@HOST:PORT/DATABASE for state and sessions, which several "
            "gateways may share; by default LOCKSTEP_STORE, else files of this machine."
        ),
    ] = None
    advertise: Annotated[
        str | None,
        _listen_option(
            help="URL by which other gateways on the same store reach this one's admin port; by "
            "default where it listens."
        ),
    ] = None
    fresh: Annotated[
        bool,
        _state_option(
            "--fresh", help="Start over with the model's own weights; the old state is moved aside."
        ),
    ] = False
    sessions: Annotated[
        str | None,
        _state_option(
            help="SQLite file for the sessions, or 'memory', which keeps the state in memory too "
            "unless --state-dir is given; by default in the state directory."
        ),
    ] = None
    session_hours: Annotated[
        float,
        _state_option(
            help="Hours without a request after which a session is deleted, if its samples were "
            "read."
        ),
    ] = 24.0
    expire_unread: Annotated[
        bool,
        _state_option(
            "--expire-unread", help="Delete idle sessions even if their samples were never read."
        ),
    ] = False
    run_dir: Annotated[
        Path | None,
        _state_option(help="Directory of a training run, whose curves the dashboard shows."),
    ] = None
    host: Annotated[str, _listen_option(help="Address to listen on for requests.")] = "127.0.0.1"
    port: Annotated[int, _listen_option(help="Port for requests; 0: any free port.")] = 8000
    gateways: Annotated[
        int,
        _listen_option(
            help="Number of gateway processes on the port, for many cores; more than one need "
            "--store."
        ),
    ] = 1
    share_port: Annotated[
        bool,
        _listen_option(
            "--share-port",
            help="Let other gateways of this user listen on the same port: each takes some of the "
            "connections.",
        ),
    ] = False
    admin_port: Annotated[
        int,
        _listen_option(help="Port of the admin routes; 0: any free port."),
    ] = 8001
    key_file: Annotated[
        Path | None,
        _listen_option(
            help="File of API keys and their tenants, made by `lockstep keys`; changes take effect "
            "at once. By default LOCKSTEP_KEY_FILE."
        ),
    ] = None
    shared_sessions: Annotated[
        bool,
        _listen_option(
            "--shared-sessions",
            help="Let all API keys use the same sessions, request ids and cached prompts.",
        ),
    ] = False
    admin_host: Annotated[
        str, _listen_option(help="Address to listen on for the admin routes.")
    ] = "127.0.0.1"
    tls_cert: Annotated[
        Path | None,
        _listen_option(help="PEM file of the certificate of both ports; read again on change."),
    ] = None
    tls_key: Annotated[Path | None, _listen_option(help="PEM file of its key.")] = None
    tls_client_ca: Annotated[
        Path | None,
        _listen_option(help="PEM file of those whose certificates clients of the admin port need."),
    ] = None
    allow_origin: Annotated[
        list[str] | None,
        _listen_option(help="Site whose web pages may call the gateway; may be repeated."),
    ] = None
    limit: Annotated[
        list[str] | None,
        _traffic_option(
            help="Limit of requests, connections and sessions, as NAME=NUMBER; may be repeated. "
            "See docs/security.md for the names."
        ),
    ] = None
    insecure: Annotated[
        bool,
        _listen_option(
            "--insecure", help="Let other machines connect without an API key (LOCKSTEP_API_KEYS)."
        ),
    ] = False
    trace: Annotated[
        bool,
        _listen_option(
            "--trace",
            help="Send spans of requests and updates, also those of workers it starts, to an "
            "OpenTelemetry collector; OTEL_EXPORTER_OTLP_ENDPOINT says where.",
        ),
    ] = False
    as_json: Annotated[
        bool,
        _listen_option("--json", help="When ready, print one JSON line instead of text."),
    ] = False
    drain_seconds: Annotated[
        float,
        _listen_option(help="Seconds that running requests get after SIGTERM or Ctrl-C."),
    ] = DRAIN_SECONDS
    max_in_flight: Annotated[int, _traffic_option(help="Most requests at the workers at once.")] = (
        1024
    )
    queue_limit: Annotated[
        int,
        _traffic_option(help="Most requests that wait; more get status 429."),
    ] = 4096
    queue_seconds: Annotated[
        float,
        _traffic_option(help="Longest wait of a request; then it gets status 503."),
    ] = 60.0

    budget: Annotated[
        list[str] | None,
        _traffic_option(
            help="Seconds that a worker may take in an update, as NAME=SECONDS: stage, pause, "
            "swap, commit, prove, resume, straggler and stage_straggler (beyond most others); may "
            "be repeated."
        ),
    ] = None
    health_seconds: Annotated[
        float,
        _traffic_option(
            help="Seconds without a response after which a worker is down and its requests are "
            "tried elsewhere."
        ),
    ] = 10.0

    def __post_init__(self) -> None:
        """Raises BadRequest for a negative time."""
        for name, value in (
            ("session_hours", self.session_hours),
            ("drain_seconds", self.drain_seconds),
        ):
            if not value >= 0:
                raise BadRequest(
                    f"--{name.replace('_', '-')} is {value}: expected 0 or more", param=name
                )

    def options(self, settings: Settings, store: Store | None = None) -> GatewayOptions:
        """Return the options of the gateway, with its sessions and API keys in `store`."""
        from lockstep.gateway.app import GatewayOptions
        from lockstep.gateway.sessions.limits import SESSION_LIMITS
        from lockstep.http.auth import check_origins

        limits, http, session_limits = parse_limits(
            self.limit or (), REQUEST_LIMITS, LIMITS, SESSION_LIMITS
        )
        return GatewayOptions(
            host=self.host,
            port=self.port,
            share_port=self.share_port or self.gateways > 1,
            single_port=self.single_port,
            admin_host=self.admin_host,
            admin_port=self.admin_port,
            tls=TlsFiles.of_listener(self.tls_cert, self.tls_key, self.tls_client_ca),
            origins=check_origins(self.allow_origin or ()),
            http=http,
            limits=limits,
            api_keys=settings.api_keys,
            key_file=self.key_file or settings.key_file,
            shared_sessions=self.shared_sessions,
            key_store=None if store is None else store.keys,
            sessions=None if store is None else store.sessions,
            session_limits=session_limits,
            session_seconds=self.session_hours * 3600,
            expire_unread=self.expire_unread,
            tokenizer=self.tokenizer,
            insecure=self.insecure,
            drain_seconds=self.drain_seconds,
        )

    def pool(self, settings: Settings) -> Pool:
        """The pool of workers, with these limits; workers that join get the key of the settings."""
        from lockstep.fleet.routing.pool import Pool

        return Pool(
            max_in_flight=self.max_in_flight,
            queue_limit=self.queue_limit,
            queue_seconds=self.queue_seconds,
            health_seconds=self.health_seconds,
            worker_api_key=settings.worker_api_key,
        )

    def budgets(self) -> PhaseBudgets:
        """How long each phase of an update may take. Raises BadRequest."""
        from lockstep.fleet.fan_out import PhaseBudgets

        return PhaseBudgets.parse(self.budget or ())
