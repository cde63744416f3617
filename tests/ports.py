"""Ports for servers that a test starts on a port known beforehand.

A port that the system picks is free again before the server binds it, and another process may get
it in between. These are below the range that systems pick from, and locked until this process ends.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from itertools import chain
from pathlib import Path

PORTS = range(20_000, 32_000)
_LOCKS: list[int] = []
"""Descriptors of the locks, which are held until this process ends."""


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port that no other process gets from this function while this one runs."""
    directory = Path(tempfile.gettempdir()) / f"lockstep-test-ports-{os.getuid()}"
    directory.mkdir(exist_ok=True)
    # Processes begin at different places, so that they seldom try each other's ports.
    first = PORTS.start + os.getpid() * 97 % len(PORTS)
    for port in chain(range(first, PORTS.stop), range(PORTS.start, first)):
        lock = os.open(directory / str(port), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as sock:
                sock.bind((address, port))
        except OSError:
            os.close(lock)
            continue
        _LOCKS.append(lock)
        return port
    raise RuntimeError(f"no port of {address} from {PORTS.start} to {PORTS.stop} is free")
