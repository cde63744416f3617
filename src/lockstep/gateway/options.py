"""The options of a gateway, and their command-line flags."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from lockstep.flags import Flag
from lockstep.gateway.sessions.limits import SESSION_LIMITS, TTL_SECONDS, SessionLimits
from lockstep.http.exposure import check_admin_exposure, check_exposure
from lockstep.http.server.limits import DRAIN_SECONDS, LIMITS, ServerLimits
from lockstep.http.tls import TlsFiles
from lockstep.protocol.json.strict import LIMITS as REQUEST_LIMITS
from lockstep.protocol.json.strict import RequestLimits
from lockstep.storage.protocols import KeyStore, SessionStore
from lockstep.tokens.errors import Forbidden

listen_flag = partial(Flag, panel="Listening")
state_flag = partial(Flag, panel="State and sessions")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """How a gateway listens and what it stores. The system chooses a port of 0.

    `tls` is for both ports; clients of the admin port need a certificate if it has a `ca`.
    `origins` are the sites whose web pages may call the gateway. With `share_port`, other gateways
    may listen on the data port as well; with `single_port`, the data port takes control calls too.
    """

    tokenizer: Annotated[
        str | None,
        Flag("Bundled model or directory whose tokenizer is used; by default the model's."),
    ] = None
    control_tokens_in_text: Annotated[
        bool,
        Flag(
            "Encode control tokens that messages spell out, such as <|im_end|>, as control tokens, "
            "as other servers do. Any file that a tool returns can then forge turns."
        ),
    ] = False
    single_port: Annotated[
        bool,
        Flag(
            "Take control calls on the data port as well, at the root and with the admin token, "
            "as prime-rl's elastic pool sends them."
        ),
    ] = False
    host: Annotated[str, listen_flag("Address to listen on for requests.")] = "127.0.0.1"
    port: Annotated[int, listen_flag("Port for requests; 0: any free port.")] = 8000
    share_port: Annotated[
        bool,
        listen_flag(
            "Let other gateways of this user listen on the same port: each takes some of the "
            "connections."
        ),
    ] = False
    admin_host: Annotated[str, listen_flag("Address to listen on for the admin routes.")] = (
        "127.0.0.1"
    )
    admin_port: Annotated[int, listen_flag("Port of the admin routes; 0: any free port.")] = 8001
    admin_token: str = ""
    worker_admin_token: str | None = None
    api_keys: tuple[str, ...] = ()
    key_file: Annotated[
        Path | None,
        listen_flag(
            "File of API keys and their tenants, made by `lockstep keys`; changes take effect at "
            "once. By default LOCKSTEP_KEY_FILE."
        ),
    ] = None
    key_store: KeyStore | None = None
    shared_sessions: Annotated[
        bool,
        listen_flag("Let all API keys use the same sessions, request ids and cached prompts."),
    ] = False
    tls: TlsFiles | None = None
    origins: Annotated[
        tuple[str, ...],
        listen_flag(
            "Site whose web pages may call the gateway; may be repeated.", name="allow_origin"
        ),
    ] = ()
    insecure: Annotated[
        bool, listen_flag("Let other machines connect without an API key (LOCKSTEP_API_KEYS).")
    ] = False
    drain_seconds: Annotated[
        float, listen_flag("Seconds that running requests get after SIGTERM or Ctrl-C.")
    ] = DRAIN_SECONDS
    sessions: SessionStore | None = None
    session_seconds: Annotated[
        float,
        state_flag(
            "Hours without a request after which a session is deleted, if its samples were read.",
            name="session_hours",
            unit=3600,
        ),
    ] = TTL_SECONDS
    expire_unread: Annotated[
        bool, state_flag("Delete idle sessions even if their samples were never read.")
    ] = False
    session_limits: SessionLimits = SESSION_LIMITS
    limits: RequestLimits = REQUEST_LIMITS
    http: ServerLimits = LIMITS

    def check(self) -> None:
        """Raise Forbidden for a listener that is open to the network without a key or TLS."""
        stored = self.key_store is not None and self.key_store.required
        keyed = bool(self.api_keys) or self.key_file is not None or stored
        check_exposure(self.host, keyed, self.insecure)
        check_admin_exposure(self.admin_host, self.tls is not None, self.insecure)
        if self.single_port:
            check_admin_exposure(self.host, self.tls is not None, self.insecure)
            if self.tls is not None and self.tls.ca is not None:
                raise Forbidden(
                    "--single-port would take control calls without the client certificate that "
                    "--tls-client-ca asks for: leave out one of the two",
                    param="single_port",
                )
