"""Request ids from clients: short and printable, because they appear in headers and logs."""

from __future__ import annotations

import re

from lockstep.tokens.errors import BadRequest

TENANT_HEADER = "X-Lockstep-Tenant"
"""Header from gateways to workers with a name for the tenant, which no client can choose."""
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")


def is_request_id(name: str) -> bool:
    """Return whether a text can be a request id."""
    return REQUEST_ID.fullmatch(name) is not None


def check_request_id(name: str | None, param: str = "request_id") -> None:
    """Raise BadRequest for an invalid request id; None passes."""
    if name is not None and not is_request_id(name):
        excerpt = name if len(name) <= 80 else f"{name[:77]}..."
        raise BadRequest(
            f"{param} is {excerpt!r}: expected 1 to 256 printable ASCII characters without spaces",
            param=param,
        )
