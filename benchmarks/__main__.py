"""Measure every section and write docs/benchmarks.md.

    python -m benchmarks                    # measure all sections, then write the page
    python -m benchmarks gateway agents     # measure these, then write the page
    python -m benchmarks --page             # write the page from benchmarks/results alone

Every section runs in a process of its own, one after the other; the machine should be idle. Its
rows are stored in benchmarks/results/SECTION.json.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from benchmarks import peers, table
from lockstep.progress import Progress

SECTIONS = {
    "gateway": "gateway.bench",
    "agents": "agents",
    "scale": "scale",
    "pool": "postgres_pool",
    "sessions": "sessions.bench",
    "trainers": "trainers",
    "update": "update.bench",
    "client": "client",
    "tokenizing": "tokenizing",
    "engine": "engine.bench",
    "exactness": "engine.exactness",
    "tracing": "tracing",
    "dashboard": "dashboard",
    "http": "http.bench",
    "prefixes": "shared_prefixes",
    "demo": "demo",
}
"""The module that measures each section, in the order of the table that opens the page."""
RESULTS = Path(__file__).parent / "results"
DOCUMENT = table.ROOT / "docs" / "benchmarks.md"
BLOCK = re.compile(r"(<!-- measured: (\w+) -->\n).*?(<!-- /measured -->)", re.S)
SUMMARY, MACHINE = "summary", "machine"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--page", action="store_true", help="write the page without measuring")
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"no such section: {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    if not options.page:
        measure([name for name in SECTIONS if name in (options.sections or SECTIONS)])
    DOCUMENT.write_text(page(DOCUMENT.read_text(), stored()))
    print(f"written to {DOCUMENT}")


def measure(names: list[str]) -> None:
    """Measure these sections by their own commands, which store and print their rows."""
    RESULTS.mkdir(exist_ok=True)
    with Progress("Measuring", len(names)) as progress:
        for name in names:
            progress.say(name)
            command = [sys.executable, "-m", f"benchmarks.{SECTIONS[name]}"]
            subprocess.run([*command, "--json", str(RESULTS / f"{name}.json")], check=True)
            progress.advance()


def stored() -> dict[str, table.Result]:
    """The stored results by section; sections that were never measured are missing."""
    paths = {name: RESULTS / f"{name}.json" for name in SECTIONS}
    return {name: table.read(path) for name, path in paths.items() if path.exists()}


def page(text: str, results: dict[str, table.Result]) -> str:
    """Replace the measured blocks of the page; the text that people wrote around them stays.

    Raises SystemExit when the page lacks the block of a section."""
    blocks = {name: f"Not measured yet: run `python -m benchmarks {name}`." for name in SECTIONS}
    blocks |= {name: markdown(result) for name, result in results.items()}
    blocks[SUMMARY] = table.summary(row for result in results.values() for row in result.rows)
    blocks[MACHINE] = machines(results)
    present = {match[2] for match in BLOCK.finditer(text)}
    if present != set(blocks):
        raise SystemExit(f"the page has the blocks {sorted(present)}, expected {sorted(blocks)}")
    return BLOCK.sub(lambda match: f"{match[1]}{blocks[match[2]]}\n{match[3]}", text)


def markdown(result: table.Result) -> str:
    return f"{table.markdown(result.rows)}\n\nCommit `{result.commit}`, {result.date}."


def machines(results: dict[str, table.Result]) -> str:
    """The commits and machines of all sections, and the versions of the alternatives."""
    places: dict[tuple[str, str, str], list[str]] = {}
    for name, result in results.items():
        places.setdefault((result.commit, result.date, result.machine), []).append(name)
    lines = []
    for (commit, date, machine), names in places.items():
        sections = ", ".join(names)
        lines.append(f"- Commit `{commit}`, {date}, {machine}: {sections}.")
    return "\n".join([*lines, f"- Alternatives: {', '.join(peers.VERSIONS.values())}."])


if __name__ == "__main__":
    main()
