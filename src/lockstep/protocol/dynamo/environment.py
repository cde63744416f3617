"""Environment variables of Dynamo's processes, and the defaults that Lockstep sets."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from lockstep.tokens.errors import BadRequest

DISCOVERY = "DYN_DISCOVERY_BACKEND"
STORE = "DYN_FILE_KV"
ETCD = "ETCD_ENDPOINTS"
NATS = "NATS_SERVER"
REQUEST_PLANE = "DYN_REQUEST_PLANE"
EVENT_PLANE = "DYN_EVENT_PLANE"
NAMESPACE = "DYN_NAMESPACE"
SYSTEM_PORT = "DYN_SYSTEM_PORT"
SYSTEM_HOST = "DYN_SYSTEM_HOST"
RL_PORT = "DYN_RL_PORT"
LOOPBACK = "127.0.0.1"

DATA_HOSTS = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST")
"""Addresses for requests, responses and events. If unset, Dynamo uses an address of the host."""

LOCAL = {REQUEST_PLANE: "tcp", EVENT_PLANE: "zmq", **dict.fromkeys(DATA_HOSTS, LOOPBACK)}
"""Defaults for one machine: its processes listen on loopback only."""

ALWAYS = {
    # The system port has admin routes without a password, so any other address must be explicit.
    SYSTEM_HOST: LOOPBACK,
    "HF_HUB_OFFLINE": "1",
    "DYN_SDK_DISABLE_ANSI_LOGGING": "1",
    "DYN_LOG": "warn",
}

FRONTEND = {
    "DYN_ENABLE_RL": "true",
    "DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE": "1",
}
"""A frontend that lists its workers on its RL port and has the token-in/token-out route."""

SCHEMES = {"etcd": "http", "etcds": "https"}


def complete(environ: Mapping[str, str], store: Path | None = None) -> dict[str, str]:
    """Return `environ` with defaults for missing variables.

    A deployment discovered through a directory, or through an etcd on loopback by workers that
    advertise loopback, is on one machine. For others, Dynamo chooses the addresses. `store` is the
    directory of the `file` discovery, by default Dynamo's.
    """
    merged = {**ALWAYS, **environ}
    discovery = merged.setdefault(DISCOVERY, "file")
    near = all(map(is_loopback, (*endpoints(merged), _url(merged[SYSTEM_HOST]))))
    if discovery == "file" or (discovery == "etcd" and near):
        merged = {**LOCAL, **merged}
    if discovery == "file" and store is not None:
        merged[STORE] = str(store)
    return merged


def network_environ(
    discovery: str | None,
    request_plane: str | None,
    event_plane: str | None,
    advertise: str | None,
    environ: Mapping[str, str],
) -> dict[str, str]:
    """Return the variables for command-line options; `environ` is what they are added to.

    Raises BadRequest for an invalid URL, one that contains a password, NATS without an address, an
    `advertise` that is not an address of this host, and any of these without a discovery.
    """
    variables: dict[str, str] = {}
    if discovery is not None:
        scheme, _, hosts = discovery.partition("://")
        if scheme not in SCHEMES:
            raise BadRequest(
                f"discovery is {_shown(discovery)!r}: expected etcd://HOST:2379, or etcds:// for "
                "TLS, with more HOST:PORT after commas",
                param="discovery",
            )
        urls = [f"{SCHEMES[scheme]}://{host}" for host in hosts.split(",")]
        for url in urls:
            _check_url(url, "discovery", "ETCD_AUTH_USERNAME and ETCD_AUTH_PASSWORD")
        variables |= {DISCOVERY: "etcd", ETCD: ",".join(urls)}
        variables[EVENT_PLANE] = environ.get(EVENT_PLANE, "zmq")
    if request_plane is not None:
        variables[REQUEST_PLANE] = "tcp"
        if request_plane != "tcp":
            if not request_plane.startswith(("nats://", "tls://")):
                raise BadRequest(
                    f"request_plane is {_shown(request_plane)!r}: expected tcp or nats://HOST:4222",
                    param="request_plane",
                )
            _check_url(request_plane, "request_plane", "NATS_AUTH_USERNAME and NATS_AUTH_PASSWORD")
            variables |= {REQUEST_PLANE: "nats", NATS: request_plane}
    if event_plane is not None:
        variables[EVENT_PLANE] = event_plane
    if advertise is not None:
        variables |= dict.fromkeys((SYSTEM_HOST, *DATA_HOSTS), _own_address(advertise))
    merged = {**environ, **variables}
    if variables and merged.get(DISCOVERY, "file") == "file":
        raise BadRequest(
            "--request-plane, --event-plane and --advertise are for deployments of several hosts: "
            f"give --discovery etcd://HOST:2379 too, or set {DISCOVERY}",
            param="discovery",
        )
    if "nats" in (merged.get(REQUEST_PLANE), merged.get(EVENT_PLANE)) and not merged.get(NATS):
        raise BadRequest(
            f"NATS is to carry events or requests, but nobody says where it is: set {NATS} or give "
            "--request-plane nats://HOST:4222",
            param="event_plane",
        )
    return variables


def endpoints(environ: Mapping[str, str]) -> list[str]:
    """Return the URLs of etcd; Dynamo's default if none is set."""
    listed = environ.get(ETCD) or "http://localhost:2379"
    return [
        address if "://" in address else f"http://{address}"
        for address in listed.split(",")
        if address
    ]


def is_loopback(url: str | None) -> bool:
    """Return whether a URL is valid only on the host that it was made on."""
    host = urlsplit(url or "").hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_advertised(environ: Mapping[str, str], *, chosen: bool) -> None:
    """Raise BadRequest for a worker that other hosts would find under a loopback address.

    `chosen`: the user set it; then everything but etcd may be on one host, and gateways elsewhere
    reject the worker.
    """
    host = environ.get(SYSTEM_HOST, LOOPBACK)
    if chosen or environ.get(DISCOVERY) != "etcd" or not is_loopback(_url(host)):
        return
    far = next((url for url in endpoints(environ) if not is_loopback(url)), None)
    if far is not None:
        raise BadRequest(
            f"this worker would advertise {host}, where no other host reaches it, but its "
            f"deployment's etcd is on {_shown(far)}: give --advertise ADDRESS "
            f"({_towards(far)}), or --advertise {LOOPBACK} if all of it but etcd runs on this host",
            param="advertise",
        )


def _url(host: str) -> str:
    return f"http://[{host}]" if ":" in host else f"http://{host}"


def _check_url(url: str, param: str, variables: str) -> None:
    """Raise BadRequest, without quoting a password in the URL."""
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None:
        raise BadRequest(
            f"{param} holds a user or password, which every process list shows: set {variables} "
            "instead",
            param=param,
        )
    try:
        port = parts.port
    except ValueError:
        port = None
    if not parts.hostname or port is None or parts.path not in ("", "/") or parts.query:
        raise BadRequest(f"{param} names {_shown(url)!r}: expected HOST:PORT", param=param)


def _shown(url: str) -> str:
    """Return a URL without its user and password."""
    before, at, after = url.rpartition("@")
    scheme = before.partition("://")[0] if "://" in before else ""
    return f"{scheme}://...@{after}" if at else url


def _own_address(host: str) -> str:
    """Return the address of `host`, which must be one of this machine's. Raises BadRequest."""
    try:
        family, _, _, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.bind((where[0], 0))
    except OSError as error:
        raise BadRequest(
            f"advertise is {host!r}, which is no address of this host ({error.strerror}): expected "
            "one that `ip address` shows, and that the gateway and the frontends reach",
            param="advertise",
        ) from None
    return str(where[0])


def _towards(url: str) -> str:
    """Return the address this host has on the route to `url`, as a hint."""
    parts = urlsplit(url)
    try:
        family, _, _, _, where = socket.getaddrinfo(parts.hostname, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(where)  # sends nothing
            return f"this host reaches it from {sock.getsockname()[0]}"
    except OSError:
        return "one that the gateway and the frontends reach"
