"""Ports that tests choose beforehand belong to one process at a time."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from tests.ports import PORTS, free_port

ROOT = Path(__file__).parents[1]
MANY = "from tests.ports import free_port; print(*(free_port() for _ in range(50))); input()"


def test_no_port_is_returned_twice_even_to_other_processes() -> None:
    children = [
        subprocess.Popen(
            [sys.executable, "-c", MANY], cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for _ in range(2)
    ]  # fmt: skip
    ports = [free_port() for _ in range(50)]
    for child in children:
        assert child.stdout is not None
        ports += map(int, child.stdout.readline().split())
    for child in children:
        child.communicate("\n")
    assert len(set(ports)) == len(ports) == 150
    assert set(ports) <= set(PORTS)


def test_a_port_in_use_is_not_returned() -> None:
    with socket.socket() as sock:
        taken = free_port() + 1
        try:
            sock.bind(("127.0.0.1", taken))
        except OSError:
            return  # another process uses it, and it is not returned either
        assert free_port() != taken
