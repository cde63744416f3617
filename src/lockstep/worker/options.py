"""The options of a worker process, and their command-line flags. This module imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

from lockstep.engine.options import EngineOptions
from lockstep.flags import Flag
from lockstep.http.server.limits import DRAIN_SECONDS, ServerLimits
from lockstep.http.server.limits import LIMITS as SERVER_LIMITS
from lockstep.http.tls import TlsFiles
from lockstep.protocol.json.strict import LIMITS, RequestLimits

listen_flag = partial(Flag, panel="Listening")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Options of one worker's ports. Port 0 picks a free port; `api_keys` protect the data port.

    `tls` applies to both ports. If it has a `ca`, every client needs a certificate.
    """

    model: str
    host: Annotated[str, listen_flag("Address to listen on for requests.")] = "127.0.0.1"
    port: Annotated[int, listen_flag("Port for requests; 0: any free port.")] = 0
    system_port: Annotated[int, listen_flag("Port of the admin routes; 0: any free port.")] = 0
    system_host: Annotated[str, listen_flag("Address to listen on for the admin routes.")] = (
        "127.0.0.1"
    )
    admin_token: str | None = None
    api_keys: tuple[str, ...] = ()
    tls: TlsFiles | None = None
    origins: Annotated[
        tuple[str, ...],
        listen_flag(
            "Site whose web pages may call the worker; may be repeated.", name="allow_origin"
        ),
    ] = ()
    http: ServerLimits = SERVER_LIMITS
    limits: RequestLimits = LIMITS
    insecure: Annotated[
        bool, listen_flag("Let other machines connect without an API key (LOCKSTEP_API_KEYS).")
    ] = False
    served_name: Annotated[
        str | None,
        listen_flag(
            "Name of the model in requests; by default the directory's.", name="served_model_name"
        ),
    ] = None
    checkpoint_roots: Annotated[
        tuple[str, ...],
        listen_flag(
            "Directory, or prefix of an object store (s3://bucket/run), that weights may be loaded "
            "from; may be repeated.",
            name="checkpoint_root",
        ),
    ] = ()
    drain_seconds: Annotated[
        float, listen_flag("Seconds that running requests get after SIGTERM.")
    ] = DRAIN_SECONDS
    engine: EngineOptions = field(default_factory=EngineOptions)
    return_routed_experts: Annotated[
        bool,
        Flag(
            "Return the routed experts of a mixture-of-experts model for every request.",
            panel="Engine",
        ),
    ] = False
