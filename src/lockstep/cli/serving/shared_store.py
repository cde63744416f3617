"""Options of gateways that share a store: which ones fit `--store`, and their admin addresses."""

from __future__ import annotations

from lockstep.cli.serving.arguments import GatewayArguments
from lockstep.settings import Settings
from lockstep.storage.store import BACKENDS, find_backend
from lockstep.tokens.errors import BadRequest


def check_shared(url: str, arguments: GatewayArguments, settings: Settings) -> None:
    """Raise BadRequest for a store that cannot be shared, and for options that do not fit one."""
    if not find_backend(url).shared:
        schemes = ", ".join(scheme for scheme, backend in BACKENDS.items() if backend.shared)
        raise BadRequest(
            f"--store is for stores that gateways share ({schemes}): give --state-dir for files of "
            "this machine",
            param="store",
        )
    for name, value in (("sessions", arguments.sessions), ("state-dir", arguments.state_dir)):
        if value is not None:
            raise BadRequest(
                f"--{name} {value} and a store: sessions and state are in the store; leave one of "
                "them out",
                param="store",
            )
    if settings.admin_token is None:
        raise BadRequest(
            "gateways that share a store forward admin calls to each other, and so need one admin "
            "token: set LOCKSTEP_ADMIN_TOKEN or LOCKSTEP_ADMIN_TOKEN_FILE alike for all of them",
            param="store",
        )


def advertised(arguments: GatewayArguments, admin_url: str) -> str:
    """Return the URL under which other gateways reach this one's admin port.

    Raises BadRequest when it listens on all addresses and --advertise is not given.
    """
    if arguments.advertise is not None:
        return arguments.advertise.rstrip("/")
    if "://0.0.0.0:" in admin_url or "://[::]:" in admin_url:
        raise BadRequest(
            f"the admin port listens at {admin_url}, which other gateways cannot call: give "
            "--advertise http://HOST:PORT, the address by which they reach this machine",
            param="advertise",
        )
    return admin_url
