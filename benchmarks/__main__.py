"""All benchmarks: one table of ratios, printed and written into docs/benchmarks.md.

    python -m benchmarks [gateway engine ...]

Every section runs in a process of its own, one after the other, on an otherwise quiet machine.
With sections named, only these are measured, and the document stays as it is.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from benchmarks import peers, table
from lockstep.progress import Progress

SECTIONS = {
    "http": ("HTTP server and client", "http.bench"),
    "gateway": ("Gateway: CPU per request", "gateway.bench"),
    "tracing": ("Gateway: CPU per request with tracing", "tracing"),
    "agents": ("Gateway: a turn of a long agent session, by dialect", "agents"),
    "dashboard": ("Gateway: CPU of the dashboard", "dashboard"),
    "sessions": ("Gateway: memory of sessions", "sessions.bench"),
    "scale": ("Gateways on a shared store", "scale"),
    "pool": ("Gateways on a shared store: connection pool", "postgres_pool"),
    "tokenizing": ("Gateway: /tokenize", "tokenizing"),
    "client": ("Client", "client"),
    "engine": ("Embedded engine on one core", "engine.bench"),
    "exactness": ("Embedded engine: exact beside close", "engine.exactness"),
    "update": ("Weight updates", "update.bench"),
    "trainers": ("A step of a trainer", "trainers"),
    "demo": ("The demo, end to end", "demo"),
}
"""The heading of each section and the module that measures it."""
DOCUMENT = Path(__file__).parents[1] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- measured: written by `make bench` -->", "<!-- /measured -->"
OURS = ("lockstep-rl", "torch", "transformers", "renderers", "msgspec", "uvicorn", "httptools")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"no such section: {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    begun = time.monotonic()
    chosen = [SECTIONS[name] for name in SECTIONS if name in (options.sections or SECTIONS)]
    measured = {}
    with Progress("Measuring", len(chosen)) as progress:
        for title, module in chosen:
            progress.say(title)
            measured[title] = measure(module)
            progress.advance()
    for title, rows in measured.items():
        print(f"\n{title}\n{table.plain(rows)}")
    minutes = (time.monotonic() - begun) / 60
    print(f"\n{tally(measured)}, in {minutes:.0f} minutes")
    if not options.sections:
        write(DOCUMENT, measured, minutes)
        print(f"written to {DOCUMENT}")


def measure(module: str) -> list[table.Row]:
    """The rows of one section, by its own command."""
    print(f"{module} ...", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "rows.json"
        command = [sys.executable, "-m", f"benchmarks.{module}", "--json", str(result)]
        subprocess.run(command, check=True)
        return table.read(result)


def tally(measured: dict[str, list[table.Row]]) -> str:
    marks = [row.reached for rows in measured.values() for row in rows]
    return f"{marks.count(True)} rows reached, {marks.count(False)} missed"


def write(path: Path, measured: dict[str, list[table.Row]], minutes: float) -> None:
    """Puts the tables between the marks of the document; what people wrote around stays."""
    text = path.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{path} has lost its marks {BEGIN} and {END}")
    parts = [about(minutes), f"{tally(measured)}."]
    parts += [f"### {title}\n\n{table.markdown(rows)}" for title, rows in measured.items()]
    path.write_text(before + begin + "\n\n" + "\n\n".join(parts) + "\n\n" + end + after)


def about(minutes: float) -> str:
    today = datetime.now(UTC).date()
    ours = ", ".join(f"{name} {version(name)}" for name in OURS)
    theirs = ", ".join(peers.VERSIONS.values())
    return (
        f"Measured on {today} by `make bench` in {minutes:.0f} minutes, on {os.cpu_count()} cores "
        f"of {processor()}, Linux {platform.release()}, Python {platform.python_version()}. "
        f"Lockstep's environment: {ours}. Peers in their own: {theirs}."
    )


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
