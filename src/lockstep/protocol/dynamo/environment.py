"""The environment that Dynamo's processes read, and what Lockstep puts there for its user."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

DISCOVERY = "DYN_DISCOVERY_BACKEND"
STORE = "DYN_FILE_KV"
REQUEST_PLANE = "DYN_REQUEST_PLANE"
NAMESPACE = "DYN_NAMESPACE"
SYSTEM_PORT = "DYN_SYSTEM_PORT"
SYSTEM_HOST = "DYN_SYSTEM_HOST"
RL_PORT = "DYN_RL_PORT"

LOCAL = {
    DISCOVERY: "file",
    REQUEST_PLANE: "tcp",
    "DYN_EVENT_PLANE": "zmq",
    "DYN_TCP_RPC_HOST": "127.0.0.1",
    "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
    "DYN_EVENT_PLANE_HOST": "127.0.0.1",
}
"""One machine: processes find each other in a directory, and listen on loopback only."""

ALWAYS = {
    # The system port has admin routes and no password: whoever wants it elsewhere must say so.
    SYSTEM_HOST: "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "DYN_SDK_DISABLE_ANSI_LOGGING": "1",
    "DYN_LOG": "warn",
}

FRONTEND = {
    "DYN_ENABLE_RL": "true",
    "DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE": "1",
}
"""A frontend that lists its workers on its RL port, and has the token-in/token-out route."""


def complete(environ: Mapping[str, str], store: Path | None = None) -> dict[str, str]:
    """`environ` with what is missing; what is set stays.

    Where another discovery than `file` is set, processes live on several machines: then addresses
    are left to Dynamo. `store` is the directory of the `file` discovery, by default Dynamo's.
    """
    merged = {**ALWAYS, **environ}
    if merged.get(DISCOVERY, "file") == "file":
        merged = {**LOCAL, **merged}
        if store is not None:
            merged[STORE] = str(store)
    return merged
