"""Checks of what a listener exposes: addresses, keys, encryption, and the sites of web pages."""

from __future__ import annotations

from collections.abc import Iterable

from lockstep.tokens.errors import BadRequest, Forbidden

LOOPBACK = ("127.0.0.1", "localhost", "::1")
ANY_ORIGIN = "*"


def hosts_of(listening_on: str) -> tuple[str, ...] | None:
    """Return the Host headers that a listener accepts: None for any, unless it is on loopback."""
    return LOOPBACK if listening_on in LOOPBACK else None


def check_exposure(listening_on: str, keyed: bool, insecure: bool) -> None:
    """Raise Forbidden for a listener that is open to the network without a key."""
    if hosts_of(listening_on) is None and not keyed and not insecure:
        raise Forbidden(
            f"--host {listening_on} would serve every client that can reach this machine: set "
            f"LOCKSTEP_API_KEYS, or pass --insecure if that is intended",
            param="host",
        )


def check_admin_exposure(listening_on: str, tls: bool, insecure: bool) -> None:
    """Raise Forbidden for an admin port whose token would cross the network unencrypted."""
    if hosts_of(listening_on) is None and not tls and not insecure:
        raise Forbidden(
            f"the admin port on {listening_on} would receive its token unencrypted: give "
            f"--tls-cert and --tls-key, or pass --insecure if a mesh or a proxy encrypts",
            param="host",
        )


def check_origins(origins: Iterable[str]) -> tuple[str, ...]:
    """Return the origins as browsers send them. Raises BadRequest for a text that is no origin."""
    checked = []
    for origin in origins:
        scheme, slashes, rest = origin.partition("://")
        if origin != ANY_ORIGIN and (not scheme or not slashes or not rest or "/" in rest):
            raise BadRequest(
                f"--allow-origin is {origin!r}: expected SCHEME://HOST[:PORT] without a path, or *",
                param="allow_origin",
            )
        checked.append(origin.lower())
    return tuple(checked)
