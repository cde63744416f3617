"""Two hosts on one machine: this one, and a network namespace at the other end of a link.

The namespace has a loopback of its own and nothing but the link to reach anybody else, so that
addresses, refusals and cut cables are those of two machines. That needs root and `ip netns`.
Where the machine does not allow it, both hosts are this one, and what needs a link is not tested:
a warning in pytest's summary says so.
"""

from __future__ import annotations

import os
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

LOUD = "NO NETWORK NAMESPACES HERE: two hosts are played by one, and cut links are NOT tested: {}"


@dataclass(frozen=True)
class Host:
    """Where a process runs. `prefix` goes before its command; others reach it at `address`."""

    address: str
    prefix: tuple[str, ...] = ()


@dataclass(frozen=True)
class Hosts:
    """Two hosts; `link` is how `ip` names the far end of their cable, where there is one."""

    here: Host
    there: Host
    link: tuple[str, ...] | None = None

    @contextmanager
    def unplugged(self) -> Iterator[None]:
        """The cable is out, there, while the block runs; here packets get lost."""
        namespace, end = self.link or ("", "")
        _ip("-n", namespace, "link", "set", end, "down")
        try:
            yield
        finally:
            _ip("-n", namespace, "link", "set", end, "up")


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """The hosts, which go with the block."""
    number = os.getpid()
    name, near, far = f"ls{number}", f"lsa{number}", f"lsb{number}"
    net = f"10.{77 + number % 100}.{number // 100 % 256}"
    try:
        _ip("netns", "add", name)
        _ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        _ip("addr", "add", f"{net}.1/24", "dev", near)
        _ip("-n", name, "addr", "add", f"{net}.2/24", "dev", far)
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "link", "set", far, "up")
        _ip("link", "set", near, "up")
    except (OSError, subprocess.CalledProcessError) as error:
        _end(name)
        told = getattr(error, "stderr", None) or str(error)
        warnings.warn(LOUD.format(told.strip()), stacklevel=2)
        yield Hosts(Host("127.0.0.1"), Host("127.0.0.1"))
        return
    try:
        there = Host(f"{net}.2", ("ip", "netns", "exec", name))
        yield Hosts(Host(f"{net}.1"), there, (name, far))
    finally:
        _end(name)


def _end(name: str) -> None:
    """The link goes with the namespace."""
    try:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    except OSError:
        return


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
