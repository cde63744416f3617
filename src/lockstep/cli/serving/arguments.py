"""The options that `lockstep serve`, `lockstep gateway` and `lockstep tinker` share."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lockstep.flags import Flag
from lockstep.fleet.fan_out import PhaseBudgets
from lockstep.fleet.routing.pool import Pool
from lockstep.gateway.options import GatewayOptions
from lockstep.gateway.sessions.limits import SESSION_LIMITS
from lockstep.http.exposure import check_origins
from lockstep.http.server.limits import LIMITS, parse_limits
from lockstep.http.tls import ListenerTls
from lockstep.protocol.json.strict import LIMITS as REQUEST_LIMITS
from lockstep.tokens.errors import BadRequest
from lockstep.tokens.operation import RequiredProof

if TYPE_CHECKING:
    from lockstep.settings import Settings
    from lockstep.storage import Store

_listen_flag = partial(Flag, panel="Listening")
_traffic_flag = partial(Flag, panel="Traffic")
_state_flag = partial(Flag, panel="State and sessions")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayArguments:
    """The options of a gateway process: of its state, of the gateway, of its pool of workers."""

    state_dir: Annotated[
        str | None,
        _state_flag(
            "Directory for the weight version and the sessions, or 'memory' to keep nothing; "
            "by default one for each model under ~/.local/state/lockstep."
        ),
    ] = None
    store: Annotated[
        str | None,
        _state_flag(
            "postgresql://USER@HOST:PORT/DATABASE for state and sessions, which several "
            "gateways may share; by default LOCKSTEP_STORE, else files of this machine."
        ),
    ] = None
    fresh: Annotated[
        bool, _state_flag("Start over with the model's own weights; the old state is moved aside.")
    ] = False
    sessions: Annotated[
        str | None,
        _state_flag(
            "SQLite file for the sessions, or 'memory', which keeps the state in memory too "
            "unless --state-dir is given; by default in the state directory."
        ),
    ] = None
    run_dir: Annotated[
        Path | None, _state_flag("Directory of a training run, whose curves the dashboard shows.")
    ] = None
    gateway: GatewayOptions = field(default_factory=GatewayOptions)
    tls: ListenerTls = field(default_factory=ListenerTls)
    prime_rl: Annotated[bool, Flag("Print the lines of prime-rl's configuration for it.")] = False
    checkpoint_root: Annotated[
        tuple[str, ...],
        Flag(
            "Directory, or prefix of an object store (s3://bucket/run), that weights may be loaded "
            "from; may be repeated."
        ),
    ] = ()
    require_proof: Annotated[
        RequiredProof,
        Flag(
            "Least evidence of a worker's weights: any (logprobs suffice), or held (the weights it "
            "computes with, read back, equal the checkpoint's)."
        ),
    ] = "any"
    gateways: Annotated[
        int,
        _listen_flag(
            "Number of gateway processes on the port, for many cores; more than one need --store."
        ),
    ] = 1
    advertise: Annotated[
        str | None,
        _listen_flag(
            "URL by which other gateways on the same store reach this one's admin port; by "
            "default where it listens."
        ),
    ] = None
    trace: Annotated[
        bool,
        _listen_flag(
            "Send spans of requests and updates, also those of workers it starts, to an "
            "OpenTelemetry collector; OTEL_EXPORTER_OTLP_ENDPOINT says where."
        ),
    ] = False
    as_json: Annotated[
        bool, _listen_flag("When ready, print one JSON line instead of text.", name="json")
    ] = False
    pool: partial[Pool] = field(default_factory=lambda: partial(Pool))
    limit: Annotated[
        tuple[str, ...],
        _traffic_flag(
            "Limit of requests, connections and sessions, as NAME=NUMBER; may be repeated. "
            "See docs/security.md for the names."
        ),
    ] = ()
    budget: Annotated[
        tuple[str, ...],
        _traffic_flag(
            "Seconds that a worker may take in an update, as NAME=SECONDS: stage, pause, "
            "swap, commit, prove, resume, straggler and stage_straggler (beyond most others); may "
            "be repeated."
        ),
    ] = ()

    def __post_init__(self) -> None:
        """Raise BadRequest for a negative time."""
        for name, value in (
            ("session_hours", self.gateway.session_seconds / 3600),
            ("drain_seconds", self.gateway.drain_seconds),
        ):
            if not value >= 0:
                raise BadRequest(
                    f"--{name.replace('_', '-')} is {value}: expected 0 or more", param=name
                )

    def options(self, settings: Settings, store: Store | None = None) -> GatewayOptions:
        """Return the options of the gateway, with its sessions and API keys in `store`."""
        limits, http, session_limits = parse_limits(
            self.limit, REQUEST_LIMITS, LIMITS, SESSION_LIMITS
        )
        return replace(
            self.gateway,
            share_port=self.gateway.share_port or self.gateways > 1,
            tls=self.tls.files(),
            origins=check_origins(self.gateway.origins),
            http=http,
            limits=limits,
            api_keys=settings.api_keys,
            worker_admin_token=settings.worker_admin_token,
            key_file=self.gateway.key_file or settings.key_file,
            key_store=None if store is None else store.keys,
            sessions=None if store is None else store.sessions,
            session_limits=session_limits,
        )

    def make_pool(self, settings: Settings) -> Pool:
        """Make the pool of workers; workers that join get the key of the settings."""
        return self.pool(worker_api_key=settings.worker_api_key)

    def with_tokenizer(self, model: str) -> GatewayArguments:
        """Return these arguments with the tokenizer of `model`, unless a tokenizer is set."""
        tokenizer = self.gateway.tokenizer or model
        return replace(self, gateway=replace(self.gateway, tokenizer=tokenizer))

    def budgets(self) -> PhaseBudgets:
        """Return how long each phase of an update may take. Raises BadRequest."""
        return PhaseBudgets.parse(self.budget)
