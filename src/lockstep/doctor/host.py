"""Checks of the machine itself: CPU, ports and directories. They need no optional package."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from lockstep import __version__
from lockstep.doctor.check import Check
from lockstep.settings import state_home

PORTS = {8000: "--port", 8001: "--admin-port"}
"""Default ports of `lockstep serve`, and the options that change them."""
REPORTED_FLAGS = ("sse4_2", "avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")
MIN_FREE_BYTES = 1 << 30
"""Free disk space below which a note is printed: a few checkpoints of a small model."""


def versions() -> Check:
    """Report the versions of Lockstep, Python and the operating system."""
    finding = f"{__version__}, Python {platform.python_version()}, {platform.platform(terse=True)}"
    return Check("lockstep", "ok", finding)


def cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> Check:
    """Report the CPU's name, the usable cores, and the vector instructions it lists."""
    fields: dict[str, str] = {}
    if cpuinfo.is_file():
        for line in cpuinfo.read_text("utf-8", "replace").splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    name = fields.get("model name") or platform.processor() or platform.machine()
    listed = set((fields.get("flags") or fields.get("Features") or "").split())
    flags = [flag for flag in REPORTED_FLAGS if flag in listed]
    return Check("CPU", "ok", f"{name}, {cores()} cores, {' '.join(flags) or platform.machine()}")


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def port(number: int, option: str) -> Check:
    """Check whether `lockstep serve` can listen on a port, and name the process that does."""
    name = f"port {number}"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", number))
        except OSError as error:
            holder = _holder(number) or error.strerror or "taken"
            return Check(
                name, "note", holder, f"lockstep serve {option} PORT, or stop that process"
            )
    return Check(name, "ok", "free")


def state_directory(home: Path | None = None) -> Check:
    """Check whether `lockstep serve` can write its state and sessions."""
    home = home or state_home()
    return _writable("state directory", home, "set XDG_STATE_HOME to a directory you may write")


def run_directory(here: Path | None = None) -> Check:
    """Check whether `lockstep demo` can write to `runs` in the working directory."""
    where = (here or Path.cwd()) / "runs"
    check = _writable("run directory", where, "lockstep demo --run-dir DIRECTORY")
    return replace(check, status="fail" if check.status == "note" else "ok")


def _writable(name: str, where: Path, way_out: str) -> Check:
    """Check by writing a file to the directory, or to its first parent that exists."""
    # The check must not create the directory, so it writes where it would be created.
    there = next(path for path in (where, *where.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            free = shutil.disk_usage(there).free
    except OSError as error:
        return Check(name, "note", f"{where}: {error.strerror}", way_out)
    finding = f"{where}, {free / 2**30:.0f} GiB free"
    if free < MIN_FREE_BYTES:
        return Check(name, "note", f"{where}, only {free / 2**20:.0f} MiB free", way_out)
    return Check(name, "ok", finding)


def _holder(number: int) -> str | None:
    """Return the process that listens on a TCP port, if Linux reveals it."""
    inodes = set(_listening(number))
    for process in Path("/proc").glob("[0-9]*") if inodes else ():
        if inodes & set(_open_files(process)):
            command = (process / "cmdline").read_text("utf-8", "replace").replace("\0", " ").strip()
            return f"held by process {process.name}: {command[:60]}"
    return "held by a process of another user" if inodes else None


def _open_files(process: Path) -> Iterable[str]:
    """Yield the open files of a process; none if it has ended or belongs to another user."""
    with suppress(OSError):
        for link in (process / "fd").iterdir():
            with suppress(OSError):
                yield os.readlink(link)


def _listening(number: int) -> Iterable[str]:
    """Yield the inodes of sockets that listen on a TCP port."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            fields = row.split()
            if int(fields[1].rpartition(":")[2], 16) == number and fields[3] == "0A":
                yield f"socket:[{fields[9]}]"
