"""The code blocks of the documentation, with the marks that stand above them.

A block of `console` or `python` is run. A comment on the line above it says otherwise:

    <!-- needs: vllm -->            run with the engines' suite (also sglang, dynamo), or the
                                    trainers' (tinker, trl, verifiers), the agents', or the
                                    scale-out suite (postgres, ray)
    <!-- not run: the reason -->    shown only
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w-]*).*$")
MARK = re.compile(r"^<!-- (?P<kind>needs|not run): (?P<text>.+?) -->$")
RUN = ("console", "python")
SHOWN = ("json", "mermaid", "text", "toml", "yaml")
COMMAND = re.compile(r"^ {4,}(\$ )?(lockstep|make|curl|pip|python|export|scripts/|\.venv)\b")
BACKGROUND = re.compile(r"\s&$")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block. `needs` names an engine, `reason` says why it is not run."""

    page: str
    line: int
    language: str
    text: str
    needs: str | None = None
    reason: str | None = None

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> Iterator[str]:
        """The commands of a console block: prompts are left out, continued lines joined.

        A command that the reader would put into the background is given without its &.
        """
        pending = ""
        for line in self.text.splitlines():
            pending += line.removeprefix("$ ") + "\n"
            if line.endswith("\\") or _is_open(pending):
                continue
            if command := pending.strip():
                yield BACKGROUND.sub("", command)
            pending = ""
        if pending.strip():
            raise ValueError(f"{self.place}: a quote or a here-document is not closed")


def pages() -> list[str]:
    """README and every page under docs/, as paths from the root."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path.relative_to(ROOT).as_posix() for path in paths]


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    fenced: list[Block] = []
    lines = (ROOT / page).read_text("utf-8").splitlines()
    at = 0
    while at < len(lines):
        opened = FENCE.match(lines[at])
        if opened is None:
            at += 1
            continue
        end = next(
            row for row in range(at + 1, len(lines)) if lines[row].strip() == "```"
        )  # fmt: skip
        indent = len(opened["indent"])
        text = "\n".join(line[indent:] for line in lines[at + 1 : end])
        mark = MARK.match(lines[at - 1].strip()) if at else None
        kind, note = (mark["kind"], mark["text"]) if mark else (None, None)
        fenced.append(
            Block(
                page,
                at + 1,
                opened["language"],
                text,
                needs=note if kind == "needs" else None,
                reason=note if kind == "not run" else None,
            )
        )
        at = end + 1
    return fenced


def runnable(page: str, needs: str | None = None) -> list[Block]:
    """The blocks of a page that are run where that engine is."""
    return [
        block
        for block in blocks(page)
        if block.language in RUN and block.needs == needs and block.reason is None
    ]


def is_quickstart(page: str) -> bool:
    """Whether a newcomer reads it first; the rest are guides."""
    return page in ("README.md", "docs/install.md") or page.startswith("docs/quickstart/")


def loose_commands(page: str) -> list[str]:
    """Commands in indented blocks, which no test would run."""
    commands = []
    fenced = False
    for number, line in enumerate((ROOT / page).read_text("utf-8").splitlines(), 1):
        if FENCE.match(line):
            fenced = not fenced
        elif not fenced and COMMAND.match(line):
            commands.append(f"{page}:{number}: {line.strip()}")
    return commands


def _is_open(text: str) -> bool:
    """Whether a quote, or a here-document, goes on in the next line."""
    if started := re.search(r"<<-? ?['\"]?(\w+)['\"]?", text):
        return not re.search(rf"^{started[1]}$", text, re.MULTILINE)
    code = re.sub(r"(^|\s)#.*$", "", re.sub(r"\\.", "", text), flags=re.MULTILINE)
    single = re.sub(r'"[^"]*"', "", code)
    return single.count("'") % 2 == 1 or re.sub(r"'[^']*'", "", code).count('"') % 2 == 1
