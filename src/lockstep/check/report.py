"""Report of a check, as one JSON object or as a Markdown table."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.check.row import Finding

VERDICTS = ("pass", "fail", "n.a.", "error")


@dataclass(frozen=True, slots=True)
class Report:
    """All findings about one server. `held_back` counts the rows that --mutate would add."""

    url: str
    transport: str
    model: str
    version: str
    findings: tuple[Finding, ...]
    held_back: int = 0

    @property
    def kept(self) -> bool:
        """Whether the contract is kept: no row failed, and all of them could be run."""
        return all(finding.verdict in ("pass", "n.a.") for finding in self.findings)

    @property
    def counts(self) -> dict[str, int]:
        counts = Counter[str](finding.verdict for finding in self.findings)
        return {verdict: counts[verdict] for verdict in VERDICTS}

    def summary(self) -> str:
        counts = ", ".join(f"{count} {verdict}" for verdict, count in self.counts.items())
        more = f"; {self.held_back} rows change the server: --mutate" if self.held_back else ""
        return f"{counts}{more}"

    def json(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "transport": self.transport,
            "model": self.model,
            "lockstep": self.version,
            "kept": self.kept,
            "counts": self.counts,
            "held_back": self.held_back,
            "rows": [asdict(finding) for finding in self.findings],
        }

    def markdown(self) -> str:
        lines = ["| row | checks that | verdict | evidence | law |", "|---|---|---|---|---|"]
        for finding in self.findings:
            verdict = (
                finding.verdict if finding.verdict in ("pass", "n.a.") else f"**{finding.verdict}**"
            )
            cells = (f"`{finding.id}`", finding.title, verdict, finding.evidence, finding.law)
            lines.append("| " + " | ".join(map(_cell, cells)) + " |")
        return "\n".join([*lines, "", self.summary() + "."])


def _cell(text: str) -> str:
    """Escape text so that it cannot end its table cell or be read as HTML."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
