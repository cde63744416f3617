"""docs/clients.md names the versions that this suite runs."""

from __future__ import annotations

import re

from tests.clients.conftest import ROOT


def test_every_version_on_the_page_is_installed() -> None:
    page = (ROOT / "docs" / "clients.md").read_text().partition("## Errors that clients match")[0]
    pins = "\n".join(
        (ROOT / name).read_text()
        for name in (
            "scripts/clients-requirements.txt",
            "scripts/agents-requirements.txt",
            "scripts/install-clients.sh",
            "constraints.txt",
        )
    )
    rows = [line.split("|")[1:3] for line in page.splitlines() if re.match(r"\| [a-zA-Z]", line)]
    assert len(rows) > 15
    for client, versions in rows:
        for version in re.findall(r"\d+\.\d+\.\d+", versions):
            assert re.search(rf"(==|@){re.escape(version)}\n", pins), f"{client.strip()} {version}"
