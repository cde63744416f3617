"""Limits of a listener: sizes, deadlines, connections and file descriptors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVarTuple

from lockstep.tokens.errors import BadRequest

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

Groups = TypeVarTuple("Groups")
DESCRIPTORS = 1 << 16
"""File descriptors that a server process requests, if the system allows that many."""
RESERVED_DESCRIPTORS = 64
FEWEST_CONNECTIONS = 16
DRAIN_SECONDS = 30.0
"""Default time that a stopping server waits for running responses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits of one listener. The defaults suit a server on a network; `--limit NAME=NUMBER` sets
    any of them.

    connections         open at once; past it the longest idle one is closed, or a new one gets 503
    keep_alive_seconds  a connection is closed after this time without a request
    head_seconds        time for a request line and its headers, from their first byte
    progress_seconds    period in which a body must grow, and a response must be read, by
    progress_bytes      this many bytes, or end; otherwise 408, or the connection is reset
    head_bytes          size of a request line with its headers (431 past it)
    framing_bytes       trailers, chunk extensions and the like of one body (431 past it); trailers
                        are ignored, they never become headers
    pipelined_bytes     requests sent before the response to an earlier one; past it reading pauses
    linger_seconds      a refused connection is still read for this time, so that it gets the reason
    sweep_seconds       interval at which deadlines are checked
    """

    connections: int = 4096
    keep_alive_seconds: float = 75.0
    head_seconds: float = 20.0
    progress_seconds: float = 30.0
    progress_bytes: int = 64 << 10
    head_bytes: int = 64 << 10
    framing_bytes: int = 16 << 10
    pipelined_bytes: int = 256 << 10
    linger_seconds: float = 2.0
    sweep_seconds: float = 1.0


LIMITS = ServerLimits()
"""The default limits."""


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files as far as is useful and allowed; return the limit."""
    if resource is None:
        return DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return DESCRIPTORS
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft >= wanted:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def connections_within(descriptors: int, wanted: int, listeners: int) -> int:
    """Return how many connections one of `listeners` may hold, at most `wanted`.

    Half of the descriptors stay free: a process whose clients used them all could neither reach its
    workers nor open a file.
    """
    share = (descriptors - RESERVED_DESCRIPTORS) // 2 // max(1, listeners)
    return min(wanted, max(FEWEST_CONNECTIONS, share))


def parse_limits(options: Iterable[str], *groups: *Groups) -> tuple[*Groups]:
    """Return groups of limits (frozen dataclasses), changed by options NAME=NUMBER.

    Raises BadRequest for an option that names no field of any group, or has no positive number.
    """
    changed: list[Any] = list(groups)
    owners = {field.name: at for at, group in enumerate(changed) for field in fields(group)}
    for option in options:
        name, _, text = option.partition("=")
        at = owners.get(name)
        value = None
        if at is not None:
            value = _number(text, whole=isinstance(getattr(changed[at], name), int))
        if at is None or value is None:
            raise BadRequest(
                f"--limit is {option[:200]!r}: expected NAME=NUMBER, with one of "
                f"{', '.join(owners)}",
                param="limit",
            )
        changed[at] = replace(changed[at], **{name: value})
    return tuple(changed)


def _number(text: str, *, whole: bool) -> float | None:
    """Return the positive number in a text, or None."""
    try:
        number = int(text) if whole else float(text)
    except ValueError:
        return None
    return number if 0 < number < math.inf else None
